"""Prompts forced to another worker than has computed them: without its blocks, and with them."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from msgspec import Struct

from router.local.demo import Demo
from router.local.workload import Turn
from router.protocol.replies import BlockSource
from router.protocol.values import Rank

TOLD_S = 60.0
_POLL_S = 0.02


class Forced(Struct, frozen=True):
    """One prompt, computed at `source`, then asked of `rank` twice, which had nothing of it."""

    turn: Turn
    rank: Rank
    source: BlockSource
    alone_tokens: int
    """Cached, where it was not told of the source."""
    alone_ttft_s: float
    shared_tokens: int
    """Cached, where it was."""
    shared_ttft_s: float


class SharingDemo:
    """Forces prompts elsewhere in a fleet whose workers share."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo

    async def run(self, turns: Sequence[Turn], tell: Callable[[Forced], None]) -> list[Forced]:
        """Each prompt from one worker to the next. Raises TimeoutError."""
        ranks = sorted(await self._demo.look_around())
        first_of = {rank.worker_id: rank for rank in reversed(ranks)}
        pairs = itertools.cycle(itertools.permutations(first_of.values(), 2))
        forced = []
        for turn, (there, here) in zip(turns, pairs, strict=False):
            forced.append(await self._forced(turn, there, here))
            tell(forced[-1])
        return forced

    async def _forced(self, turn: Turn, there: Rank, here: Rank) -> Forced:
        """Computed there, then asked for here."""
        await self._demo.forget_everything()
        await self._demo.complete(there, turn.token_ids)
        source = await self._source(turn, here)
        alone = await self._demo.complete(here, turn.token_ids)
        await self._demo.forget(here)
        shared = await self._demo.complete(here, turn.token_ids, source=source)
        return Forced(turn, here, source, *alone, *shared)

    async def _source(self, turn: Turn, here: Rank) -> BlockSource:
        """What the router names once it has heard of all blocks."""
        async with asyncio.timeout(TOLD_S):
            while True:
                decision = await self._demo.select(turn.token_ids, here.worker_id)
                full_blocks = decision.isl_tokens // decision.block_size
                if decision.source is not None and decision.source.blocks == full_blocks:
                    return decision.source
                await asyncio.sleep(_POLL_S)

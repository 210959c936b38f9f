"""Blocks of a prompt in lower tiers, held so that they stay until they are loaded.

Each tier, fastest first, is searched for the blocks behind those found so far: blocks behind a gap
are useless.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName


class Source(Protocol):
    """A tier's pool: it finds blocks, and keeps them until they are released."""

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Hold the leading blocks of a prompt that this tier has."""

    def release(self, blocks: Sequence[int]) -> None:
        """Release held blocks."""


class LowerTier(Struct, frozen=True):
    """A tier below the engine's memory."""

    tier: Tier
    pool: Source


class PinnedRun(Struct):
    """Leading blocks in one tier, held until they are released."""

    source: LowerTier
    blocks: list[int]


class PinnedPrefix:
    """The held blocks of a prompt, as runs by tier; released once."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[PinnedRun] = []

    def __len__(self) -> int:
        """Return the number of blocks."""
        return sum(len(run.blocks) for run in self._runs)

    @property
    def runs(self) -> Sequence[tuple[Tier, int]]:
        """Number of blocks from each tier, in prompt order."""
        return [(run.source.tier, len(run.blocks)) for run in self._runs]

    def add(self, source: LowerTier, identities: Sequence[bytes]) -> int:
        """Hold the leading blocks that this tier has, and return their number."""
        blocks = source.pool.match(identities)
        if blocks:
            self._runs.append(PinnedRun(source, blocks))
        return len(blocks)

    def drop_to(self, count: int) -> None:
        """Release all blocks but the first `count`, from the last on."""
        for _ in range(len(self) - count):
            run = self._runs[-1]
            run.source.pool.release([run.blocks.pop()])
            if not run.blocks:
                self._runs.pop()

    def release(self) -> None:
        """Release all blocks; calling it again has no effect."""
        runs, self._runs = self._runs, []
        for run in reversed(runs):
            run.source.pool.release(run.blocks)


def hold(tiers: Sequence[LowerTier], names: Sequence[BlockName]) -> PinnedPrefix:
    """Hold the leading blocks of `names` that the tiers have. O(blocks).

    If a tier raises KvRouterError, all blocks are released and the error is raised.
    """
    held = PinnedPrefix()
    identities = [name.identity for name in names]
    try:
        for source in tiers:
            found = held.add(source, identities)
            identities = identities[found:]
    except KvRouterError:
        held.release()
        raise
    return held

"""Blocks of a prompt that lower tiers have, held so that they stay until they are loaded.

Each tier, fastest first, is asked for what the ones before it do not have: behind a gap nothing is
of use.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName


class Source(Protocol):
    """What says which blocks a tier has, and keeps them."""

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Hold the leading blocks of a prompt that are here."""

    def release(self, blocks: Sequence[int]) -> None:
        """Give them back."""


class LowerTier(Struct, frozen=True):
    """A tier below the engine's memory."""

    tier: Tier
    pool: Source


class HeldRun(Struct):
    """Leading blocks that one tier has, in use until they are given back."""

    source: LowerTier
    blocks: list[int]


class Held:
    """What was found of a prompt, run by run; given back once."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[HeldRun] = []

    def __len__(self) -> int:
        """Blocks."""
        return sum(len(run.blocks) for run in self._runs)

    @property
    def runs(self) -> Sequence[tuple[Tier, int]]:
        """From which tier how many blocks come, in prompt order."""
        return [(run.source.tier, len(run.blocks)) for run in self._runs]

    def add(self, source: LowerTier, identities: Sequence[bytes]) -> int:
        """Hold the leading ones that this tier has; how many."""
        blocks = source.pool.match(identities)
        if blocks:
            self._runs.append(HeldRun(source, blocks))
        return len(blocks)

    def drop_last(self) -> None:
        """Do without the last block, which is in the slowest tier."""
        run = self._runs[-1]
        run.source.pool.release([run.blocks.pop()])
        if not run.blocks:
            self._runs.pop()

    def release(self) -> None:
        """Give all of it back; again is nothing."""
        runs, self._runs = self._runs, []
        for run in reversed(runs):
            run.source.pool.release(run.blocks)


def hold(tiers: Sequence[LowerTier], names: Sequence[BlockName], first: int) -> Held:
    """Hold what the tiers have of `names[first:]`; if one refuses, nothing. O(blocks found)."""
    held = Held()
    identities = [name.identity for name in islice(names, first, None)]
    try:
        for source in tiers:
            found = held.add(source, identities)
            identities = identities[found:]
    except KvRouterError:
        held.release()
        raise
    return held

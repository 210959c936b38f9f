"""Lookups in the index, the same over HTTP and NATS: who holds how much of a prompt?

Adds to the core what is not its business: the clock, another thread for long prompts, and how often
blocks were asked for. Between reading the fleet and the index nothing awaits.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from router.core import RouterCore
from router.index_errors import NoIndexerError
from router.indexer.base import Overlap, OverlapScores
from router.indexer.frequency import UseCounts
from router.prompts import THREAD_TOKENS, prepared
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import PromptRequest
from router.protocol.values import U64_MAX, HashArray, Identity, Rank, Scope
from router.sequence.hashing import chain
from router.sequence.naming import BlockNaming

MAX_USES = 1_000_000
"""Uses of blocks remembered per scope; beyond, the oldest are forgotten."""

HashesOf: TypeAlias = Callable[[Identity], HashArray]
"""Sequence hashes of the prompt asked about, as workers of this identity name them."""


class RankMatch(Struct, frozen=True):
    """What a rank holds of a prompt, in blocks of this many tokens."""

    rank: Rank
    block_size: int
    overlap: Overlap


class Found(Struct, frozen=True):
    """The ranks that hold at least the first block, and how often each matched block was used."""

    matches: list[RankMatch]
    frequencies: list[int]


class Lookups:
    """Lookups in the index of one core. All raise NoIndexerError where a scope has no worker.

    `frequency_window_s`: how far back uses are counted; 0 counts none.
    """

    def __init__(self, core: RouterCore, frequency_window_s: float) -> None:
        self._core = core
        self._window_s = frequency_window_s
        self._uses: dict[Scope, UseCounts] = {}

    async def by_tokens(self, request: PromptRequest) -> Found:
        """By the tokens of the prompt. Raises InvalidFieldError where there are too many."""
        workers = self.workers(request.scope)
        identities = {worker.identity for worker in workers}
        prompt = await prepared(request, identities, naming=self._core.naming)
        return self._find(request.scope, lambda identity: prompt.hashed(identity).sequence_hashes)

    async def by_hashes(self, scope: Scope, block_hashes: Sequence[int]) -> Found:
        """By the local hashes of the prompt's blocks, signed or unsigned."""
        self.workers(scope)
        if len(block_hashes) > THREAD_TOKENS:
            hashes = await asyncio.to_thread(_chained, block_hashes, self._core.naming)
        else:
            hashes = _chained(block_hashes, self._core.naming)
        return self._find(scope, lambda _: hashes)

    def workers(self, scope: Scope) -> list[WorkerAnnouncement]:
        """Everybody announced or registered in a scope, schedulable or not."""
        workers = [w.announcement for w in self._core.fleet if w.announcement.scope == scope]
        if not workers:
            raise NoIndexerError(scope)
        return workers

    def _find(self, scope: Scope, hashes_of: HashesOf) -> Found:
        workers = self.workers(scope)
        identities = {worker.identity for worker in workers}
        held = {i: self._core.index.find_matches(scope, hashes_of(i)) for i in identities}
        matches = [
            RankMatch(rank, worker.identity.block_size, held[worker.identity][rank])
            for worker in workers
            for rank in worker.ranks
            if rank in held[worker.identity]
        ]
        prefixes = [hashes_of(i)[: _longest(held[i])] for i in identities]
        return Found(matches, self._note_uses(scope, max(prefixes, key=len)))

    def _note_uses(self, scope: Scope, prefix: HashArray) -> list[int]:
        if not self._window_s:
            return []
        if scope not in self._uses:
            scopes = {worker.announcement.scope for worker in self._core.fleet}
            self._uses = {s: uses for s, uses in self._uses.items() if s in scopes}
            self._uses[scope] = UseCounts(self._window_s, MAX_USES)
        return self._uses[scope].note(prefix, time.monotonic())


def _longest(scores: OverlapScores) -> int:
    return max((overlap.remote for _, overlap in scores.items()), default=0)


def _chained(block_hashes: Sequence[int], naming: BlockNaming) -> HashArray:
    return naming.names(chain([block_hash & U64_MAX for block_hash in block_hashes]))

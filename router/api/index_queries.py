"""Responses of the standalone index, in the shapes of Dynamo's indexer. Mutates nothing."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from router.api.errors import NoIndexerError
from router.api.prompt_hashing import THREAD_TOKENS, prepared
from router.core.core import RouterCore
from router.core.fleet import FleetWorker
from router.core.registered_workers import RegisteredWorker
from router.core.views.workers import EngineOf
from router.indexer.base import Overlap, OverlapScores
from router.indexer.frequency import UseCounts
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.index_service import (
    InstanceOverlap,
    InstanceView,
    ListenerView,
    Matches,
    QueryReply,
    WorkerWithRank,
)
from router.protocol.replies import TrustState
from router.protocol.requests import PromptRequest
from router.protocol.values import U64_MAX, HashArray, Identity, Rank, Scope
from router.sequence.hashing.block_hashes import chain
from router.sequence.hashing.keyed_hashes import HashKeying

MAX_USES = 1_000_000
"""Limit of the uses of blocks recorded per scope; the oldest are dropped."""

HashesOf: TypeAlias = Callable[[Identity], HashArray]
"""A function that returns the prompt's sequence hashes, as workers of an identity name them."""


class RankMatch(Struct, frozen=True):
    """The prefix of a prompt that a rank holds, in blocks of `block_size` tokens."""

    rank: Rank
    block_size: int
    overlap: Overlap


class Found(Struct, frozen=True):
    """The ranks that hold at least the first block, and the uses of each matched block."""

    matches: list[RankMatch]
    frequencies: list[int]


class Lookups:
    """Lookups in the index of one core. Each raises NoIndexerError if a scope has no worker.

    `frequency_window_s`: the window in which uses are counted; 0 counts none.
    """

    def __init__(self, core: RouterCore, frequency_window_s: float) -> None:
        self._core = core
        self._window_s = frequency_window_s
        self._uses: dict[Scope, UseCounts] = {}

    async def by_tokens(self, request: PromptRequest) -> Found:
        """Look a prompt up by its tokens. Raises InvalidFieldError if there are too many."""
        workers = self.workers(request.scope)
        identities = {worker.identity for worker in workers}
        prompt = await prepared(request, identities, naming=self._core.naming)
        return self._find(request.scope, lambda identity: prompt.hashed(identity).sequence_hashes)

    async def by_hashes(self, scope: Scope, block_hashes: Sequence[int]) -> Found:
        """Look a prompt up by the local hashes of its blocks, signed or unsigned."""
        self.workers(scope)
        if len(block_hashes) > THREAD_TOKENS:
            hashes = await asyncio.to_thread(_chained, block_hashes, self._core.naming)
        else:
            hashes = _chained(block_hashes, self._core.naming)
        return self._find(scope, lambda _: hashes)

    def workers(self, scope: Scope) -> list[WorkerAnnouncement]:
        """Return all workers announced or registered in a scope, schedulable or not."""
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


def _chained(block_hashes: Sequence[int], naming: HashKeying) -> HashArray:
    return naming.names(chain([block_hash & U64_MAX for block_hash in block_hashes]))


FROM_BUS, FROM_SOCKETS = "nats", "zmq"
"""The source of an instance's events: the bus, or engines' sockets."""

_WORST_FIRST = ("degraded", "pending", "active")


def query_reply(found: Found) -> QueryReply:
    """Return the result of a lookup in tokens, by instance."""
    by_instance: dict[int, list[RankMatch]] = {}
    for match in found.matches:
        by_instance.setdefault(match.rank.worker_id, []).append(match)
    return QueryReply(
        {str(instance): _scores(here) for instance, here in by_instance.items()},
        found.frequencies,
        {str(instance): _instance_overlap(here) for instance, here in by_instance.items()},
    )


def matches(found: Found) -> Matches:
    """Return the result of a lookup in blocks, by rank."""
    return Matches(
        [
            (WorkerWithRank(match.rank.worker_id, match.rank.dp_rank), match.overlap.remote)
            for match in found.matches
        ],
        found.frequencies,
    )


def instances(core: RouterCore, engine_of: EngineOf, now_s: float) -> list[InstanceView]:
    """Return all registered and announced instances, by id."""
    return [_instance(core, worker, engine_of, now_s) for worker in core.fleet]


def _instance(
    core: RouterCore, worker: FleetWorker, engine_of: EngineOf, now_s: float
) -> InstanceView:
    announced = worker.announcement
    listeners = {
        str(rank.dp_rank): _listener(core, rank, _endpoint(worker, rank), engine_of, now_s)
        for rank in announced.ranks
    }
    statuses = {listener.status for listener in listeners.values()}
    return InstanceView(
        instance_id=announced.worker_id,
        source=_source(worker),
        status=min(statuses, key=_WORST_FIRST.index),
        model_name=announced.model_name,
        routing_group=announced.routing_group,
        block_size=announced.identity.block_size,
        endpoints={dp_rank: listener.endpoint for dp_rank, listener in listeners.items()},
        listeners=listeners,
    )


def _endpoint(worker: FleetWorker, rank: Rank) -> str:
    known = worker.announcement
    if not isinstance(known, RegisteredWorker):
        return FROM_BUS
    return (known.registration.kv_events_endpoints or {})[rank.dp_rank]


def _source(worker: FleetWorker) -> str:
    """Return the source of a worker's events: `zmq` if one rank's engine is read directly."""
    known = worker.announcement
    return FROM_SOCKETS if any(map(known.source, known.ranks)) else FROM_BUS


def _listener(
    core: RouterCore, rank: Rank, endpoint: str, engine_of: EngineOf, now_s: float
) -> ListenerView:
    trust = core.trust(rank, now_s)
    if trust.state in (TrustState.EXACT, TrustState.LAGGING):
        return ListenerView(endpoint, "active")
    was_read = trust.state is TrustState.DEGRADED or core.index.incarnation(rank) is not None
    engine = engine_of(rank)
    reason = (
        trust.reason if engine is None or was_read else f"{engine.condition} to {engine.events}"
    )
    return ListenerView(endpoint, "degraded" if was_read else "pending", reason)


def _scores(here: Sequence[RankMatch]) -> dict[str, int]:
    return {str(match.rank.dp_rank): match.overlap.remote * match.block_size for match in here}


def _instance_overlap(here: Sequence[RankMatch]) -> InstanceOverlap:
    block_size = here[0].block_size
    return InstanceOverlap(
        longest_matched=block_size * max(match.overlap.remote for match in here),
        gpu=block_size * max(match.overlap.device for match in here),
        dp={str(match.rank.dp_rank): block_size * match.overlap.device for match in here},
        cpu=block_size * max(match.overlap.host for match in here),
        disk=block_size * max(match.overlap.disk for match in here),
    )

"""What callers of the index alone read, in the shapes of Dynamo's indexer. Mutates nothing."""

from collections.abc import Sequence

from router.core import RouterCore
from router.fleet import Worker
from router.lookups import Found, RankMatch
from router.protocol.lookups import InstanceOverlap, Matches, QueryReply, WorkerWithRank
from router.protocol.registrations import InstanceView, ListenerView
from router.protocol.replies import TrustState
from router.protocol.values import Rank
from router.registrations import RegisteredWorker
from router.worker_views import EngineOf

FROM_BUS, FROM_SOCKETS = "nats", "zmq"
"""Where an instance's events come from."""

_WORST_FIRST = ("degraded", "pending", "active")


def query_reply(found: Found) -> QueryReply:
    """What was found, in tokens, by instance."""
    by_instance: dict[int, list[RankMatch]] = {}
    for match in found.matches:
        by_instance.setdefault(match.rank.worker_id, []).append(match)
    return QueryReply(
        {str(instance): _scores(here) for instance, here in by_instance.items()},
        found.frequencies,
        {str(instance): _instance_overlap(here) for instance, here in by_instance.items()},
    )


def matches(found: Found) -> Matches:
    """What was found, in blocks, by rank."""
    return Matches(
        [
            (WorkerWithRank(match.rank.worker_id, match.rank.dp_rank), match.overlap.remote)
            for match in found.matches
        ],
        found.frequencies,
    )


def instances(core: RouterCore, engine_of: EngineOf, now_s: float) -> list[InstanceView]:
    """Everybody registered or announced, by id."""
    return [_instance(core, worker, engine_of, now_s) for worker in core.fleet]


def _instance(core: RouterCore, worker: Worker, engine_of: EngineOf, now_s: float) -> InstanceView:
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


def _endpoint(worker: Worker, rank: Rank) -> str:
    known = worker.announcement
    if not isinstance(known, RegisteredWorker):
        return FROM_BUS
    return (known.registration.kv_events_endpoints or {})[rank.dp_rank]


def _source(worker: Worker) -> str:
    """`zmq` as soon as one rank's engine is heard directly."""
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

"""Instances that callers register with a standalone index, rank by rank.

Each becomes a registered worker like any other, with a rank for every endpoint named.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from router.api.errors import (
    AlreadyRegisteredError,
    AnnouncedInstanceError,
    BlockSizeMismatchError,
    InstanceNotFoundError,
    OtherScopeError,
    UnsupportedFieldError,
)
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker, registered_worker, sources_of
from router.errors import InvalidFieldError
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.index_service import RegisterRequest, UnregisterRequest
from router.protocol.values import U64_MAX, Rank
from router.protocol.workers import WorkerRegistration


def check_instance(request: RegisterRequest, *, has_bus: bool) -> None:
    """Check whether this version can read the events of an instance.

    Raises InvalidFieldError, UnsupportedFieldError.
    """
    if request.instance_id > U64_MAX:
        reason = f"got {request.instance_id}"
        raise InvalidFieldError("instance_id", reason, f"0 to {U64_MAX}", status=422)
    if request.additional_salt:
        reason = "engines report the salt of each block themselves"
        raise UnsupportedFieldError("additional_salt", reason, "null, or an empty string")
    if not is_bus(request.endpoint):
        return
    if not has_bus:
        reason = f"{request.endpoint!r}: this process was started without nats_url"
        raise UnsupportedFieldError("endpoint", reason, "tcp://host:port or ipc:///path")
    if request.replay_endpoint is not None:
        reason = "missing events are requested over the bus"
        raise UnsupportedFieldError("replay_endpoint", reason, "null where endpoint is nats")


def is_bus(endpoint: str) -> bool:
    """Return whether events come from this service's bus; the URL in `nats://…` is not used."""
    return endpoint == "nats" or endpoint.startswith("nats://")


def only_rank(request: RegisterRequest) -> WorkerRegistration:
    """Return the registration of the instance with this rank only."""
    replay = request.replay_endpoint
    return WorkerRegistration(
        worker_id=request.instance_id,
        model_name=request.model_name,
        routing_group=request.scope.routing_group,
        endpoint=request.endpoint,
        block_size=request.block_size,
        kv_events_endpoints={request.dp_rank: request.endpoint},
        replay_endpoints={} if replay is None else {request.dp_rank: replay},
    )


def with_rank(core: RouterCore, request: RegisterRequest) -> WorkerRegistration:
    """Return the registration of the instance with this rank added. O(workers).

    Raises AlreadyRegisteredError, OtherScopeError, AnnouncedInstanceError, BlockSizeMismatchError.
    """
    worker = core.fleet.get(request.instance_id)
    known = None if worker is None else _extendable(worker.announcement, request)
    _check_block_size(core, request)
    added = only_rank(request)
    if known is None:
        return added
    before = known.registration
    return replace(
        added,
        kv_events_endpoints=_both(before.kv_events_endpoints, added.kv_events_endpoints),
        replay_endpoints=_both(before.replay_endpoints, added.replay_endpoints),
    )


def without_rank(core: RouterCore, request: UnregisterRequest) -> WorkerRegistration | None:
    """Return the registration of the instance without this rank.

    Returns None if no rank is left, or none is named. Raises InstanceNotFoundError,
    AnnouncedInstanceError.
    """
    registered = _registered_instance(core, request)
    if request.dp_rank is None:
        return None
    return _without(registered.registration, request.dp_rank)


def instance(registration: WorkerRegistration, incarnation: int) -> RegisteredWorker:
    """Return a registered instance, with a rank for every endpoint."""
    endpoints = registration.kv_events_endpoints or {}
    read_here = [dp_rank for dp_rank, endpoint in endpoints.items() if not is_bus(endpoint)]
    sources = sources_of(registration, read_here)
    return registered_worker(registration, sorted(endpoints), sources, incarnation)


def _extendable(known: WorkerAnnouncement, request: RegisterRequest) -> RegisteredWorker:
    """Return the instance as registered so far, if a rank can be added to it."""
    if Rank(request.instance_id, request.dp_rank) in known.ranks:
        raise AlreadyRegisteredError(request.instance_id, request.dp_rank)
    if not isinstance(known, RegisteredWorker):
        raise AnnouncedInstanceError(request.instance_id)
    if known.scope != request.scope:
        raise OtherScopeError(request.instance_id, known.scope)
    return known


def _check_block_size(core: RouterCore, request: RegisterRequest) -> None:
    for worker in core.fleet:
        announced = worker.announcement
        existing = announced.identity.block_size
        if announced.scope == request.scope and existing != request.block_size:
            raise BlockSizeMismatchError(request.scope, existing, request.block_size)


def _registered_instance(core: RouterCore, request: UnregisterRequest) -> RegisteredWorker:
    worker = core.fleet.get(request.instance_id)
    if worker is None or not _matches_group(worker.announcement, request):
        raise InstanceNotFoundError(request.instance_id)
    if not isinstance(worker.announcement, RegisteredWorker):
        raise AnnouncedInstanceError(request.instance_id)
    return worker.announcement


def _matches_group(known: WorkerAnnouncement, request: UnregisterRequest) -> bool:
    """Return whether a request refers to this instance; without a group, its id suffices."""
    return known.model_name == request.model_name and request.group in (None, known.routing_group)


def _without(registration: WorkerRegistration, dp_rank: int) -> WorkerRegistration | None:
    """Return the registration without this rank. Returns None if it has no other."""
    endpoints = registration.kv_events_endpoints or {}
    if dp_rank not in endpoints:
        raise InstanceNotFoundError(registration.worker_id, f"dp_rank {dp_rank}")
    left = _other(endpoints, dp_rank)
    replays = _other(registration.replay_endpoints or {}, dp_rank)
    return (
        replace(registration, kv_events_endpoints=left, replay_endpoints=replays) if left else None
    )


def _both(before: Mapping[int, str] | None, added: Mapping[int, str] | None) -> dict[int, str]:
    return {**(before or {}), **(added or {})}


def _other(endpoints: Mapping[int, str], dp_rank: int) -> dict[int, str]:
    return {each: endpoint for each, endpoint in endpoints.items() if each != dp_rank}

"""Instances that callers register with an index alone: nobody announces them, events come anyway.

They live in the core's fleet beside the announced ones. A later announcement of the same id takes
its place: the worker knows itself better.
"""

from typing import ClassVar

from msgspec.structs import replace

from router.core import RouterCore
from router.effects import Effect
from router.errors import InvalidFieldError
from router.index_errors import (
    AlreadyRegisteredError,
    AnnouncedInstanceError,
    BlockSizeMismatchError,
    InstanceNotFoundError,
    OtherScopeError,
    TooManyRegistrationsError,
    UnsupportedFieldError,
)
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.registrations import RegisterRequest, UnregisterRequest
from router.protocol.values import SCHEME, U64_MAX, Identity, Rank

FROM_THE_BUS = "`nats`, or `nats://…`: events are read from the bus of this service"


class RegisteredWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A worker as callers registered it, rank by rank: it has any ranks, and promises no reports.

    `endpoints`: of each registered rank, by `dp_rank`.
    """

    reports_load: ClassVar[bool] = False
    endpoints: dict[int, str]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The registered ranks, in order; there may be gaps."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in sorted(self.endpoints))


def register(core: RouterCore, request: RegisterRequest, max_ranks: int, now_s: float) -> None:
    """Add a rank, whose events the core takes in from now on. O(workers).

    Raises UnsupportedFieldError, InvalidFieldError, AlreadyRegisteredError, OtherScopeError,
    AnnouncedInstanceError, BlockSizeMismatchError, TooManyRegistrationsError.
    """
    _check_fields(request)
    known = core.fleet.get(request.instance_id)
    endpoints = {} if known is None else _extendable(known.announcement, request).endpoints
    _check_block_size(core, request)
    _check_room(core, max_ranks)
    endpoints = {**endpoints, request.dp_rank: request.endpoint}
    core.upsert_worker(_registration(request, endpoints), now_s)


def unregister(core: RouterCore, request: UnregisterRequest, now_s: float) -> list[Effect]:
    """Forget a rank, or a whole instance.

    Raises InstanceNotFoundError, AnnouncedInstanceError.
    """
    registered = _registered_instance(core, request)
    left = {} if request.dp_rank is None else _without(registered, request.dp_rank)
    if not left:
        return core.remove_worker(request.instance_id, "unregistered")
    core.upsert_worker(replace(registered, endpoints=left), now_s)
    return []


def _check_fields(request: RegisterRequest) -> None:
    if request.instance_id > U64_MAX:
        reason = f"got {request.instance_id}"
        raise InvalidFieldError("instance_id", reason, f"0 to {U64_MAX}", status=422)
    if request.endpoint != "nats" and not request.endpoint.startswith("nats://"):
        reason = f"{request.endpoint!r} can not be read: this version opens no engine's sockets"
        raise UnsupportedFieldError("endpoint", reason, FROM_THE_BUS)
    if request.replay_endpoint is not None:
        reason = "this version opens no engine's sockets"
        allowed = "null: what is missing is asked for on the bus"
        raise UnsupportedFieldError("replay_endpoint", reason, allowed)
    if request.additional_salt:
        reason = "events on the bus name blocks by hashes that no salt can be added to"
        raise UnsupportedFieldError("additional_salt", reason, "null, or an empty string")


def _extendable(known: WorkerAnnouncement, request: RegisterRequest) -> RegisteredWorker:
    """The instance as registered so far, if a rank can be added to it."""
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


def _check_room(core: RouterCore, max_ranks: int) -> None:
    registered = [w.announcement for w in core.fleet if not w.announcement.reports_load]
    if sum(len(announcement.ranks) for announcement in registered) >= max_ranks:
        raise TooManyRegistrationsError(max_ranks)


def _registration(request: RegisterRequest, endpoints: dict[int, str]) -> RegisteredWorker:
    """What only placing requests would need to know is filled in."""
    return RegisteredWorker(
        worker_id=request.instance_id,
        name=f"instance {request.instance_id}",
        model_name=request.scope.model_name,
        routing_group=request.scope.routing_group,
        endpoint=request.endpoint,
        identity=Identity(SCHEME, request.block_size),
        total_kv_blocks=1,
        max_num_batched_tokens=1,
        incarnation=0,
        agent_is_engine=False,
        endpoints=endpoints,
    )


def _registered_instance(core: RouterCore, request: UnregisterRequest) -> RegisteredWorker:
    worker = core.fleet.get(request.instance_id)
    if worker is None or not _is_meant(worker.announcement, request):
        raise InstanceNotFoundError(request.instance_id)
    if not isinstance(worker.announcement, RegisteredWorker):
        raise AnnouncedInstanceError(request.instance_id)
    return worker.announcement


def _is_meant(known: WorkerAnnouncement, request: UnregisterRequest) -> bool:
    """Without a routing group any is meant: the id is unique among all."""
    return known.model_name == request.model_name and request.group in (None, known.routing_group)


def _without(registered: RegisteredWorker, dp_rank: int) -> dict[int, str]:
    if dp_rank not in registered.endpoints:
        raise InstanceNotFoundError(registered.worker_id, f"dp_rank {dp_rank}")
    return {dp: endpoint for dp, endpoint in registered.endpoints.items() if dp != dp_rank}

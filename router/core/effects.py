"""Effects: requests of the core that adapters carry out and count. Commands return them."""

from typing import TypeAlias

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.loads import Beacon, PolledLoad
from router.protocol.replicas import ProgressTold, PromptUsage, SnapshotWanted
from router.protocol.values import Rank


class RequestCheckpoint(Struct, frozen=True):
    """A request to the agent of this rank for a checkpoint."""

    rank: Rank
    reason: str


class FetchWorker(Struct, frozen=True):
    """A request to read the announcement of an unknown worker that sends reports."""

    worker_id: int


class WorkerGone(Struct, frozen=True):
    """A removed worker; its index, load and reservations are dropped."""

    worker_id: int
    reason: str
    dropped_reservations: int


class ReservationExpired(Struct, frozen=True):
    """A reservation that showed no progress for its time to live, and was freed."""

    request_id: str
    rank: Rank


class UsageTold(Struct, frozen=True):
    """An engine's usage report of a prompt, and the tokens of it that were predicted cached."""

    usage: PromptUsage
    predicted_tokens: int


class ReplicaGone(Struct, frozen=True):
    """A router that fell silent; its `dropped_reservations` no longer count."""

    router_id: int
    dropped_reservations: int


class TellReplica(Struct, frozen=True):
    """A message to another router.

    It forwards a caller's report on a request of that router, or requests a snapshot because some
    of that router's messages were missed.
    """

    router_id: int
    message: ProgressTold | SnapshotWanted


class AdmitWaiting(Struct, frozen=True):
    """A sign that waiting requests may find room now: call `RouterCore.admit`."""


class RefuseWaiting(Struct, frozen=True):
    """A refusal of a waiting request, to be sent to its caller with the reason."""

    ticket: int
    error: KvRouterError


class ShareLoad(Struct, frozen=True):
    """The load of an engine that this router polls, to be sent to the others."""

    load: PolledLoad


class SendBeacon(Struct, frozen=True):
    """A mark of this moment, to be sent to the agents."""

    beacon: Beacon


Effect: TypeAlias = (
    RequestCheckpoint
    | FetchWorker
    | WorkerGone
    | ReservationExpired
    | UsageTold
    | ReplicaGone
    | TellReplica
    | SendBeacon
    | ShareLoad
    | AdmitWaiting
    | RefuseWaiting
)

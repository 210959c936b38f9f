"""What the core asks the world to do. Commands return effects; adapters carry them out and count
them.
"""

from typing import TypeAlias

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.loads import Beacon
from router.protocol.replicas import ProgressTold, PromptUsage, SnapshotWanted
from router.protocol.values import Rank


class RequestCheckpoint(Struct, frozen=True):
    """Ask the agent of this rank for a checkpoint."""

    rank: Rank
    reason: str


class FetchWorker(Struct, frozen=True):
    """Somebody reports under this id whom we do not know: read the announcement."""

    worker_id: int


class WorkerGone(Struct, frozen=True):
    """A worker was taken out, with its index, load and reservations."""

    worker_id: int
    reason: str
    dropped_reservations: int


class ReservationExpired(Struct, frozen=True):
    """A reservation showed no progress for its time to live and was freed."""

    request_id: str
    rank: Rank


class UsageTold(Struct, frozen=True):
    """What an engine said of a prompt of ours, and how much of it we had expected to be cached."""

    usage: PromptUsage
    predicted_tokens: int


class ReplicaGone(Struct, frozen=True):
    """A router fell silent, with so many reservations, which do not count any more."""

    router_id: int
    dropped_reservations: int


class TellReplica(Struct, frozen=True):
    """Tell another router what a caller told us of its request, or that we have missed some of what
    it said.
    """

    router_id: int
    message: ProgressTold | SnapshotWanted


class AdmitWaiting(Struct, frozen=True):
    """Requests wait, and some may find room now: ask for them with `RouterCore.admit`."""


class RefuseWaiting(Struct, frozen=True):
    """A request waits no more and was not placed: tell its caller why."""

    ticket: int
    error: KvRouterError


class SendBeacon(Struct, frozen=True):
    """Mark this moment for the agents."""

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
    | AdmitWaiting
    | RefuseWaiting
)

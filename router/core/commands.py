"""The commands of a core, as values. `RouterCore.handle` executes them, recordings contain them.

A command's tag and fields are its form in recordings, which older and newer builds read: neither is
renamed, and new fields have defaults.
"""

from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct

from router.core.admission import Admission
from router.core.effects import Effect
from router.core.placement import Placement
from router.core.registered_workers import ImplicitWorker, RegisteredWorker
from router.core.settings import CoreSettings
from router.indexer.dumps import RankState
from router.indexer.event_log import LogVerdict
from router.indexer.rank_index import SourceFault
from router.indexer.snapshot import RankSnapshot
from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.events import ClassBlocks, LogMessage, TierBlocks
from router.protocol.loads import Beacon, LoadReport, PolledLoad
from router.protocol.replicas import PeerMessage, PromptUsage
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import Rank, Scope, pack_hashes
from router.scheduler.busy import BusyThresholds
from router.scheduler.eligibility import EligibilitySettings
from router.scheduler.queue.waiting_room import Queueing
from router.scheduler.settings import PolicySettings
from router.sequence.active.prompt import Prompt

R = TypeVar("R")

Handled: TypeAlias = tuple[R, list[Effect]]
"""The reply to a command, and the effects to carry out."""


class Command(Struct, Generic[R], frozen=True, tag_field="kind", omit_defaults=True):
    """A command with a reply of type `R`. `has_time`: whether its result depends on the time."""

    has_time: ClassVar[bool] = True


# ── Messages from the bus ────────────────────────────────────────────────────────────────────────


class UpsertWorker(Command[None], frozen=True, tag="upsert_worker"):
    """Add an announced worker, or update its announcement. A new incarnation resets its state."""

    announcement: WorkerAnnouncement


class UpsertRegistered(Command[None], frozen=True, tag="upsert_registered"):
    """Add or update a worker that was registered by a caller."""

    announcement: RegisteredWorker


class UpsertImplicit(Command[None], frozen=True, tag="upsert_heard"):
    """Add or update a worker of another fleet, which was found by its events."""

    announcement: ImplicitWorker


Upsert: TypeAlias = UpsertWorker | UpsertRegistered | UpsertImplicit


class RemoveWorker(Command[None], frozen=True, tag="remove_worker"):
    """Remove a worker with its index, load and reservations; an unknown worker is ignored."""

    has_time: ClassVar[bool] = False
    worker_id: int
    reason: str


class OrderWorker(Command[None], frozen=True, tag="order_worker"):
    """Cordon a worker, drain it, or let it serve again; it need not exist yet."""

    has_time: ClassVar[bool] = False
    worker_id: int
    lifecycle: Lifecycle | None


class SetProblem(Command[None], frozen=True, tag="set_problem"):
    """Set the reason why a worker is not schedulable; None clears it.

    `is_unreachable`: neither its server nor its event sockets ever answered.
    """

    has_time: ClassVar[bool] = False
    worker_id: int
    problem: str | None
    is_unreachable: bool = False


class SetSourceFault(Command[None], frozen=True, tag="set_source_fault"):
    """Set what is wrong with the event source of a rank; None clears it.

    Unknown ranks are ignored.
    """

    rank: Rank
    fault: SourceFault | None


class SetCaution(Command[None], frozen=True, tag="set_caution"):
    """Set a reason to trust a worker's events less than they claim; None clears it."""

    worker_id: int
    caution: str | None


class Apply(Command[LogVerdict | None], frozen=True, tag="apply"):
    """Apply an event-log message, or its first slice. The reply is None if its rank is unknown.

    An unknown rank is one that is not announced. The rest of a long message follows with
    `ApplySlice`, at the latest with the rank's next message.
    """

    message: LogMessage


class ApplySlice(Command[bool], frozen=True, tag="apply_slice"):
    """Apply one more slice of the messages begun. The reply is False if there is none."""

    has_time: ClassVar[bool] = False


class BeginFill(Command[None], frozen=True, tag="begin_fill"):
    """Prepare to read the event log from its start; there are no requests before `Settle`."""

    has_time: ClassVar[bool] = False


class Resume(Command[bool], frozen=True, tag="resume"):
    """Begin to restore a rank from a snapshot; see `TrustedIndex.resume`.

    The rank's log is then read from the snapshot's position. The reply is False if it cannot be
    restored, also if the rank has an event source of its own, which continues elsewhere.
    """

    state: RankState
    blocks: tuple[TierBlocks, ...]
    class_blocks: tuple[ClassBlocks, ...] = ()

    @classmethod
    def of(cls, snapshot: RankSnapshot) -> "Resume":
        """Return the command for a snapshot. O(blocks)."""
        blocks = (TierBlocks(b.tier, pack_hashes(b.sequence_hashes)) for b in snapshot.blocks)
        classes = (ClassBlocks(i, pack_hashes(h)) for i, h in enumerate(snapshot.class_blocks))
        return cls(snapshot.state, tuple(blocks), tuple(classes))


class Settle(Command[bool], frozen=True, tag="settle"):
    """Verify some restored ranks, once the log is read. The reply is False once none is left."""


class ApplyLoad(Command[None], frozen=True, tag="apply_load"):
    """Apply a load report: a sign of life, a check of the index, and rate model data."""

    report: LoadReport


class ApplyPolled(Command[bool], frozen=True, tag="apply_polled"):
    """Apply a load that a router has polled: rate model data, and no sign of life.

    The reply is False if the rank is unknown, or has an agent.
    """

    report: PolledLoad


class ApplyPeer(Command[None], frozen=True, tag="apply_peer"):
    """Apply a message of another router.

    It reports on that router's reservations, on progress of one of ours, or hands reservations
    over.
    """

    message: PeerMessage


class SetConnected(Command[None], frozen=True, tag="set_connected"):
    """Record whether there is a connection to the bus."""

    connected: bool


class StreamLost(Command[None], frozen=True, tag="stream_lost"):
    """Record that the event stream was wiped."""


class SetBusyThresholds(Command[None], frozen=True, tag="set_busy_thresholds"):
    """Set the thresholds above which ranks of a model are busy."""

    has_time: ClassVar[bool] = False
    model_name: str
    thresholds: BusyThresholds


class Reconfigure(Command[None], frozen=True, tag="reconfigure"):
    """Change these parts of `CoreSettings`; waiting requests move to the new classes.

    Raises ConfigError; then nothing is changed.
    """

    policy: PolicySettings
    max_reservations: int
    default_policy: str
    group_policies: dict[str, str]
    queueing: Queueing
    gate: EligibilitySettings

    @classmethod
    def of(cls, settings: CoreSettings) -> "Reconfigure":
        """Return the command that leads to these settings."""
        return cls(
            policy=settings.policy,
            max_reservations=settings.max_reservations,
            default_policy=settings.default_policy,
            group_policies=dict(settings.group_policies),
            queueing=settings.queueing,
            gate=settings.gate,
        )


class Tick(Command[None], frozen=True, tag="tick"):
    """Apply the passage of time: lost workers, expired reservations, overdue checkpoints."""


class MarkBeacon(Command[Beacon], frozen=True, tag="beacon"):
    """Mark this moment. Reports that carry the beacon in the reply prove how fresh the index is."""


class Tidy(Command[bool], frozen=True, tag="tidy"):
    """Free a slice of expired or cleared blocks. The reply is False once nothing is left to do."""


class Search(Command[None], frozen=True, tag="search"):
    """Search the index: it counts searches, and verifies some."""

    has_time: ClassVar[bool] = False
    scope: Scope
    sequence_hashes: bytes


# ── Decisions ────────────────────────────────────────────────────────────────────────────────────
# `prompt`: the hashed prompt of the request. Recordings do not contain it.


class Select(Command[Placement], frozen=True, tag="select"):
    """Choose a rank for a prompt. Changes only the random state and the busy ranks.

    Raises NoEndpointsError, WorkersOverloadedError, SloNotMetError.
    """

    request: SelectRequest
    prompt: Prompt | None = None


class SelectAndReserve(Command[Placement], frozen=True, tag="select_and_reserve"):
    """Choose a rank and book it, in one step.

    Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError,
    NoEndpointsError, WorkersOverloadedError, SloNotMetError; then nothing is booked.
    """

    request: SelectRequest
    prompt: Prompt | None = None


class Submit(Command[Placement | int], frozen=True, tag="submit"):
    """Choose a rank and book it; if all are busy, queue the request and reply with its ticket.

    A ticket is followed by an `Admission` or a `RefuseWaiting`. Raises QueueFullError,
    TenantQueueFullError, and what `SelectAndReserve` raises.
    """

    request: SelectRequest
    prompt: Prompt | None = None


class Reserve(Command[WorkerAnnouncement], frozen=True, tag="reserve"):
    """Book a prompt on a rank that the caller chose. The reply is its worker.

    Raises WorkerNotFoundError, and what `SelectAndReserve` raises.
    """

    request: ReserveRequest
    prompt: Prompt | None = None


class Admit(Command[Admission | None], frozen=True, tag="admit"):
    """Place the next waiting request, if a rank has room; repeat until the reply is None."""


Placing: TypeAlias = Select | SelectAndReserve | Submit | Reserve
Decision: TypeAlias = Placing | Admit


# ── Reports of callers ───────────────────────────────────────────────────────────────────────────


class Withdraw(Command[bool], frozen=True, tag="withdraw"):
    """Withdraw a waiting request by its ticket. The reply is False if it does not wait."""

    has_time: ClassVar[bool] = False
    ticket: int


class PrefillComplete(Command[None], frozen=True, tag="prefill_complete"):
    """Record that a booked prompt is computed; idempotent. Raises ReservationNotFoundError.

    `usage`: the usage that its engine reports; the first report is compared with the prediction.
    `in_batch`: the caller reports many requests in one call, at intervals. Until its next report,
    decisions use the output that the request should have generated by then.
    """

    request_id: str
    usage: PromptUsage | None = None
    in_batch: bool = False


class OutputBlock(Command[None], frozen=True, tag="output_block"):
    """Record that a booked request grew by a block. `in_batch`: see `PrefillComplete`.

    Raises ReservationNotFoundError, InvalidFieldError.
    """

    request_id: str
    decay_fraction: float | None
    in_batch: bool = False


class Free(Command[None], frozen=True, tag="free"):
    """End a booked request, or withdraw one that waits. Raises ReservationNotFoundError.

    `usage`: as in `PrefillComplete`; streams report it last.
    """

    request_id: str
    usage: PromptUsage | None = None


AnyCommand: TypeAlias = (
    Upsert
    | RemoveWorker
    | OrderWorker
    | SetProblem
    | SetSourceFault
    | SetCaution
    | Apply
    | ApplySlice
    | BeginFill
    | Resume
    | Settle
    | ApplyLoad
    | ApplyPolled
    | ApplyPeer
    | SetConnected
    | StreamLost
    | SetBusyThresholds
    | Reconfigure
    | Tick
    | MarkBeacon
    | Tidy
    | Search
    | Decision
    | Withdraw
    | PrefillComplete
    | OutputBlock
    | Free
)

AnyHandled: TypeAlias = Handled[Any]

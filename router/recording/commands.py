"""What a core can be told, as values that can be kept and told again.

An entry's fields are the arguments of the command it stands for, as they were given.
"""

import sys
from contextlib import suppress
from math import isfinite, isnan
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import astuple, replace

from router.core import RouterCore
from router.errors import KvRouterError
from router.heard import HeardWorker
from router.indexer.base import HeldBlocks
from router.indexer.dumps import RankState
from router.indexer.snapshot import RankSnapshot
from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.events import LogMessage, TierBlocks
from router.protocol.loads import LoadReport
from router.protocol.replicas import PeerMessage
from router.protocol.values import HashArray, Scope, pack_hashes, unpack_hashes
from router.registrations import RegisteredWorker
from router.scheduler.busy import BusyThresholds


class Entry(Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """One thing that happened."""


class _Command(Entry, frozen=True):
    """A command of the core: its name is the tag, its arguments are the fields, in order."""

    def tell(self, core: RouterCore) -> None:
        """Tell a core. What it refuses now it refused then, and told whoever asked."""
        with suppress(KvRouterError):
            getattr(core, str(self.__struct_config__.tag))(*astuple(self))


class UpsertWorker(_Command, frozen=True, tag="upsert_worker"):
    """A worker was announced."""

    announcement: WorkerAnnouncement
    now_s: float


class UpsertRegistered(_Command, frozen=True, tag="upsert_registered"):
    """A worker was registered by a caller."""

    announcement: RegisteredWorker
    now_s: float

    def tell(self, core: RouterCore) -> None:
        """Tell a core."""
        core.upsert_worker(self.announcement, self.now_s)


class UpsertHeard(_Command, frozen=True, tag="upsert_heard"):
    """A worker of another fleet was heard, or another rank of it."""

    announcement: HeardWorker
    now_s: float

    def tell(self, core: RouterCore) -> None:
        """Tell a core."""
        core.upsert_worker(self.announcement, self.now_s)


class RemoveWorker(_Command, frozen=True, tag="remove_worker"):
    """A worker was taken out."""

    worker_id: int
    reason: str


class OrderWorker(_Command, frozen=True, tag="order_worker"):
    """An operator wants something of a worker."""

    worker_id: int
    lifecycle: Lifecycle | None


class SetProblem(_Command, frozen=True, tag="set_problem"):
    """Something keeps anybody from being sent to a worker, or no longer does."""

    worker_id: int
    problem: str | None


class Apply(_Command, frozen=True, tag="apply"):
    """A message of the event log came."""

    message: LogMessage
    now_s: float


class ApplySlice(_Command, frozen=True, tag="apply_slice"):
    """One more slice of a message was applied."""


class BeginFill(_Command, frozen=True, tag="begin_fill"):
    """The event log is read from its start."""


class Resume(_Command, frozen=True, tag="resume"):
    """A rank began to be restored from a snapshot."""

    state: RankState
    blocks: tuple[TierBlocks, ...]
    now_s: float

    @classmethod
    def of(cls, snapshot: RankSnapshot, now_s: float) -> "Resume":
        """As it was told. O(blocks)."""
        blocks = (TierBlocks(b.tier, pack_hashes(b.sequence_hashes)) for b in snapshot.blocks)
        return cls(snapshot.state, tuple(blocks), now_s)

    def tell(self, core: RouterCore) -> None:
        """Tell a core."""
        rank = self.state.rank
        blocks = [HeldBlocks(rank, b.tier, unpack_hashes(b.sequence_hashes)) for b in self.blocks]
        core.resume(RankSnapshot(self.state, blocks), self.now_s)


class Settle(_Command, frozen=True, tag="settle"):
    """A few restored ranks were checked."""

    now_s: float


class ApplyLoad(_Command, frozen=True, tag="apply_load"):
    """A load report came."""

    report: LoadReport
    now_s: float

    @classmethod
    def of(cls, report: LoadReport, now_s: float) -> "ApplyLoad":
        """As it was told, but JSON has no infinity: the largest number stands for it."""
        counters = report.counters
        if isfinite(report.waiting_s + counters.busy_s + counters.prefill_token_contexts):
            return cls(report, now_s)
        finite = replace(
            counters,
            busy_s=_finite(counters.busy_s),
            prefill_token_contexts=_finite(counters.prefill_token_contexts),
        )
        waiting_s = _finite(report.waiting_s)
        return cls(replace(report, waiting_s=waiting_s, counters=finite), now_s)


class ApplyPeer(_Command, frozen=True, tag="apply_peer"):
    """Another router said something of its reservations, or of one of ours."""

    message: PeerMessage
    now_s: float


class SetConnected(_Command, frozen=True, tag="set_connected"):
    """The bus could be heard from now on, or no longer."""

    connected: bool
    now_s: float


class StreamLost(_Command, frozen=True, tag="stream_lost"):
    """The event stream was wiped."""

    now_s: float


class SetBusyThresholds(_Command, frozen=True, tag="set_busy_thresholds"):
    """Ranks of a model are busy above something else now."""

    model_name: str
    thresholds: BusyThresholds


class Tick(_Command, frozen=True, tag="tick"):
    """Time passed."""

    now_s: float


class MarkBeacon(_Command, frozen=True, tag="beacon"):
    """A mark in time was drawn."""

    now_s: float


class Tidy(_Command, frozen=True, tag="tidy"):
    """A slice of what expired or was cleared was freed."""

    now_s: float


class Search(_Command, frozen=True, tag="search"):
    """The index was searched, and nothing decided: it counts its searches, and checks some."""

    scope: Scope
    sequence_hashes: bytes

    @classmethod
    def of(cls, scope: Scope, sequence_hashes: HashArray) -> "Search":
        """As it was asked. O(blocks)."""
        return cls(scope, pack_hashes(sequence_hashes))

    def tell(self, core: RouterCore) -> None:
        """Ask a core."""
        core.index.find_matches(self.scope, unpack_hashes(self.sequence_hashes))


class PrefillComplete(_Command, frozen=True, tag="prefill_complete"):
    """A booked prompt was computed. A usage is not kept: no decision depends on it."""

    request_id: str
    now_s: float
    usage: None = None
    in_batch: bool = False


class OutputBlock(_Command, frozen=True, tag="output_block"):
    """A booked request grew by a block."""

    request_id: str
    decay_fraction: float | None
    now_s: float
    in_batch: bool = False


class Free(_Command, frozen=True, tag="free"):
    """A booked request ended."""

    request_id: str
    now_s: float


class Withdraw(_Command, frozen=True, tag="withdraw"):
    """The caller of a waiting request hung up."""

    ticket: int


Command: TypeAlias = (
    UpsertWorker
    | UpsertRegistered
    | UpsertHeard
    | RemoveWorker
    | OrderWorker
    | SetProblem
    | Apply
    | ApplySlice
    | BeginFill
    | Resume
    | Settle
    | ApplyLoad
    | ApplyPeer
    | SetConnected
    | StreamLost
    | SetBusyThresholds
    | Tick
    | MarkBeacon
    | Tidy
    | Search
    | PrefillComplete
    | OutputBlock
    | Free
    | Withdraw
)


def upserted(announcement: WorkerAnnouncement, now_s: float) -> Command:
    """A worker was announced, registered, or heard."""
    if isinstance(announcement, RegisteredWorker):
        return UpsertRegistered(announcement, now_s)
    if isinstance(announcement, HeardWorker):
        return UpsertHeard(announcement, now_s)
    return UpsertWorker(announcement, now_s)


def _finite(number: float) -> float:
    return 0.0 if isnan(number) else min(number, sys.float_info.max)

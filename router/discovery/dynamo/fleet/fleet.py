"""The workers of a Dynamo fleet, added by their first message and removed after long silence.

    events ─▶ DynamoRank ─▶ journal ─▶ messages ┐
    loads  ─▶ gauges ────────────────▶ reports ─┴▶ RouterCore, as from any agent

Dynamo keeps its leases in its own discovery, which cannot be read here. No message on its wire
proves how fresh an index is, so these ranks are `lagging` at best.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import astuple, replace

from router.core.commands import RemoveWorker, UpsertImplicit
from router.core.core import RouterCore
from router.core.effects import Effect
from router.core.registered_workers import ImplicitWorker
from router.discovery.dynamo.fleet.messages import ActiveLoad, EventMessage, RouterEvent
from router.discovery.dynamo.fleet.rank import DynamoRank, RankCounts
from router.discovery.dynamo.fleet.settings import DynamoSettings
from router.protocol.events import LogMessage
from router.protocol.loads import LoadGauges, LoadReport
from router.protocol.values import Rank
from router.publisher.feed.log_limiter import LogLimiter

REPORT_S = 0.4
"""The interval of the reports on a rank while only its blocks change."""


class FleetCounts(Struct):
    """Totals of the received messages, by outcome."""

    loads: int = 0
    unknown_loads: int = 0
    """Loads of ranks without an event in this component: 1.0.2 publishes for a whole namespace."""
    refused_ranks: int = 0
    """Ranks beyond the limit, or with a worker id that another worker has."""
    snapshot_events: int = 0


class _Member:
    """One rank, with its last received load and the state of its last report to the core."""

    __slots__ = ("gauges", "is_changed", "rank", "received_doubts", "report_id", "reported_s")

    def __init__(self, rank: DynamoRank) -> None:
        self.rank = rank
        self.gauges = LoadGauges()
        self.is_changed = True
        self.report_id = 0
        self.reported_s = float("-inf")
        self.received_doubts = 0

    def is_due(self, now_s: float) -> bool:
        """Return whether there is a change to report, or the last report is too old."""
        doubts_changed = self.received_doubts != self.rank.journal.doubts
        return self.is_changed or doubts_changed or now_s - self.reported_s >= REPORT_S

    def report(self, agent_incarnation: int, now_s: float) -> LoadReport:
        """Return the next report on this rank, and mark it as reported."""
        journal = self.rank.journal
        self.report_id += 1
        self.reported_s, self.received_doubts, self.is_changed = now_s, journal.doubts, False
        return LoadReport(
            worker_id=self.rank.rank.worker_id,
            dp_rank=self.rank.rank.dp_rank,
            agent_incarnation=agent_incarnation,
            incarnation=journal.incarnation,
            report_id=self.report_id,
            event_id=journal.last_event_id,
            state=replace(journal.taken_state, doubts=journal.doubts),
            gauges=self.gauges,
        )


class _Known:
    """A worker: its announcement to the core, and the time of its last message."""

    __slots__ = ("announcement", "last_seen_s", "members")

    def __init__(self, announcement: ImplicitWorker, now_s: float) -> None:
        self.announcement = announcement
        self.last_seen_s = now_s
        self.members: dict[int, _Member] = {}


class DynamoFleet:
    """All workers of one component, and their ranks; only these are reported to the core.

    `incarnation`: the base of the ranks' incarnations, above that of any earlier process.
    Invariant: a worker known here is known to the core, unless another caller removed it there.
    """

    __slots__ = (
        "_core",
        "_dirty",
        "_gone",
        "_incarnation",
        "_known",
        "_multiplier",
        "_settings",
        "complaints",
        "counts",
    )

    def __init__(
        self, core: RouterCore, settings: DynamoSettings, incarnation: int, multiplier: int
    ) -> None:
        self._core = core
        self._settings = settings
        self._incarnation = incarnation
        self._multiplier = multiplier
        self._known: dict[int, _Known] = {}
        self._dirty: dict[Rank, None] = {}
        self._gone = RankCounts()
        self.counts = FleetCounts()
        self.complaints = LogLimiter()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def worker_ids(self) -> list[int]:
        """The ids of the known workers. O(workers)."""
        return list(self._known)

    @property
    def ranks(self) -> Iterator[DynamoRank]:
        """All ranks."""
        return (m.rank for known in self._known.values() for m in known.members.values())

    def rank_counts(self) -> RankCounts:
        """Return the totals over all ranks, removed ones included. O(ranks)."""
        return _sum([self._gone, *(rank.counts for rank in self.ranks)])

    def take_events(self, message: EventMessage, now_s: float) -> None:
        """Apply the block events of a message."""
        for refusal in message.refusals:
            self.complaints.add(f"an event was dropped: {refusal}")
        for event in message.events:
            member = self._member_or_new(event.rank, now_s)
            if member is not None:
                self._complain(event, member.rank.take(event, message, now_s))
                self._dirty[event.rank] = None

    def restore(self, events: Iterable[RouterEvent], now_s: float) -> None:
        """Apply a snapshot of the blocks held before the first event still in the stream."""
        for event in events:
            member = self._member_or_new(event.rank, now_s)
            if member is not None:
                self.counts.snapshot_events += 1
                self._complain(event, member.rank.restore(event, now_s))
                self._dirty[event.rank] = None

    def take_load(self, load: ActiveLoad, now_s: float, *, may_appear: bool) -> None:
        """Apply a load message.

        `may_appear`: True if the message may add its rank.
        """
        member = self._member(load.rank)
        if member is None and may_appear:
            member = self._member_or_new(load.rank, now_s)
        if member is None:
            self.counts.unknown_loads += 1
            return
        self.note_message(load.worker_id, now_s)
        self.counts.loads += 1
        used_blocks = _first(load.kv_used_blocks, load.active_decode_blocks)
        member.gauges = LoadGauges(
            waiting_uncached_tokens=_first(
                load.active_prefill_tokens, member.gauges.waiting_uncached_tokens
            ),
            kv_used_blocks=_first(used_blocks, member.gauges.kv_used_blocks),
        )
        member.is_changed = True
        self._dirty[load.rank] = None

    def note_message(self, worker_id: int, now_s: float) -> None:
        """Record the time of a message from a worker, if the worker is known."""
        known = self._known.get(worker_id)
        if known is not None:
            known.last_seen_s = now_s

    def restart_timeouts(self, now_s: float) -> None:
        """Restart the silence timeouts of all workers, after a time without a connection."""
        for known in self._known.values():
            known.last_seen_s = now_s

    def require_checkpoint(self, rank: Rank) -> bool:
        """Request a checkpoint of a rank's blocks. Returns False for a rank of another fleet."""
        member = self._member(rank)
        if member is None:
            return False
        if member.rank.has_begun:
            member.rank.journal.require_checkpoint()
            self._dirty[rank] = None
        return True

    def tick(self, now_s: float) -> list[Effect]:
        """Apply the effects of time: update doubts, and remove workers silent for too long."""
        effects: list[Effect] = []
        for worker_id, known in list(self._known.items()):
            if now_s - known.last_seen_s >= self._settings.silence_s:
                effects += self._core.handle(RemoveWorker(worker_id, "silent"), 0.0)[1]
                self._forget(worker_id)
                continue
            for member in known.members.values():
                member.rank.tick(now_s)
                if member.received_doubts != member.rank.journal.doubts:
                    self._dirty[member.rank.rank] = None
        return effects

    def take_changed(self) -> list[Rank]:
        """Return the ranks changed since the last call, in the order of their first change."""
        changed = list(self._dirty)
        self._dirty.clear()
        return changed

    def take_messages(self, rank: Rank) -> Sequence[LogMessage]:
        """Return the pending messages on a rank's blocks to the index."""
        member = self._member(rank)
        if member is None or not member.rank.has_begun:
            return ()
        return member.rank.journal.take()

    def take_report(self, rank: Rank, now_s: float) -> LoadReport | None:
        """Return the report that is due on a rank, to be applied after its messages.

        Returns None if none is due.
        """
        member = self._member(rank)
        if member is None or not member.is_due(now_s):
            return None
        return member.report(self._known[rank.worker_id].announcement.incarnation, now_s)

    def _member(self, rank: Rank) -> _Member | None:
        known = self._known.get(rank.worker_id)
        if known is None:
            return None
        in_core = self._core.fleet.get(rank.worker_id)
        if in_core is None or in_core.announcement != known.announcement:
            self._forget(rank.worker_id)  # another caller removed it: its next message adds it anew
            return None
        return known.members.get(rank.dp_rank)

    def _member_or_new(self, rank: Rank, now_s: float) -> _Member | None:
        """Return the rank of a message, added if need be. Returns None if it must not be added."""
        member = self._member(rank) or self._admit(rank, now_s)
        self.note_message(rank.worker_id, now_s)
        return member

    def _admit(self, rank: Rank, now_s: float) -> _Member | None:
        known = self._known.get(rank.worker_id)
        refusal = self._refusal(rank, is_new_worker=known is None)
        if refusal is not None:
            self.counts.refused_ranks += 1
            self.complaints.add(f"rank {rank} is not followed: {refusal}")
            return None
        dp_ranks = sorted({rank.dp_rank, *(known.members if known is not None else ())})
        incarnation = self._next_incarnation() if known is None else known.announcement.incarnation
        worker = self._settings.worker(rank.worker_id, tuple(dp_ranks), incarnation)
        if known is None:
            known = self._known[rank.worker_id] = _Known(worker, now_s)
        known.announcement = worker
        self._core.handle(UpsertImplicit(worker), now_s)
        settings, life = self._settings, self._next_incarnation()
        member = _Member(
            DynamoRank(rank, life, settings.identity, self._multiplier, settings.naming)
        )
        known.members[rank.dp_rank] = member
        return member

    def _refusal(self, rank: Rank, *, is_new_worker: bool) -> str | None:
        if is_new_worker and self._core.fleet.get(rank.worker_id) is not None:
            return "another worker, not of this Dynamo component, has its id"
        if sum(len(known.members) for known in self._known.values()) >= self._settings.max_ranks:
            return f"the limit is reached (dynamo_max_ranks: {self._settings.max_ranks})"
        return None

    def _next_incarnation(self) -> int:
        """Return a fresh incarnation, with room below it for all lives that a rank may have."""
        self._incarnation += 1 << 20
        return self._incarnation

    def _forget(self, worker_id: int) -> None:
        known = self._known.pop(worker_id)
        for dp_rank in known.members:
            self._dirty.pop(Rank(worker_id, dp_rank), None)
        self._gone = _sum([self._gone, *(m.rank.counts for m in known.members.values())])

    def _complain(self, event: RouterEvent, refusal: str | None) -> None:
        if refusal is not None:
            event_id = event.event.event_id
            self.complaints.add(f"rank {event.rank}: event {event_id}: {refusal}")


def _first(value: int | None, otherwise: int | None) -> int:
    return (otherwise or 0) if value is None else value


def _sum(counts: Sequence[RankCounts]) -> RankCounts:
    return RankCounts(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))

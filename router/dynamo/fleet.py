"""The workers of a Dynamo fleet: they appear when first heard, and go when silent for long.

    events ─▶ DynamoRank ─▶ journal ─▶ messages ┐
    loads  ─▶ gauges ────────────────▶ reports ─┴▶ RouterCore, as from any agent

Dynamo's own leases lie in its discovery, which cannot be read here. Nothing on its wire proves how
fresh an index is, so these ranks are `lagging` at best.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import astuple, replace

from router.core import RouterCore
from router.dynamo.messages import ActiveLoad, EventMessage, RouterEvent
from router.dynamo.rank import DynamoRank, RankCounts
from router.dynamo.settings import DynamoSettings
from router.effects import Effect
from router.heard import HeardWorker
from router.protocol.events import LogMessage
from router.protocol.loads import LoadGauges, LoadReport
from router.protocol.values import Rank
from router.publisher.complaints import Complaints

REPORT_S = 0.4
"""From one report on a rank to the next, where only blocks change."""


class FleetCounts(Struct):
    """What became of what was heard, in totals."""

    loads: int = 0
    unknown_loads: int = 0
    """Of ranks that this component has not told of: 1.0.2 speaks of a whole namespace."""
    refused_ranks: int = 0
    """One too many, or of a worker id that somebody else has."""
    snapshot_events: int = 0


class _Member:
    """One rank, with what was heard of its load, and what the core was told last."""

    __slots__ = ("gauges", "is_changed", "rank", "report_id", "reported_s", "said_doubts")

    def __init__(self, rank: DynamoRank) -> None:
        self.rank = rank
        self.gauges = LoadGauges()
        self.is_changed = True
        self.report_id = 0
        self.reported_s = float("-inf")
        self.said_doubts = 0

    def is_due(self, now_s: float) -> bool:
        """Whether there is something to report, or too long nothing was."""
        doubts_changed = self.said_doubts != self.rank.journal.doubts
        return self.is_changed or doubts_changed or now_s - self.reported_s >= REPORT_S

    def report(self, agent_incarnation: int, now_s: float) -> LoadReport:
        """The next report on this rank."""
        journal = self.rank.journal
        self.report_id += 1
        self.reported_s, self.said_doubts, self.is_changed = now_s, journal.doubts, False
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
    """A worker: what the core knows it by, and when it was last heard."""

    __slots__ = ("announcement", "heard_s", "members")

    def __init__(self, announcement: HeardWorker, now_s: float) -> None:
        self.announcement = announcement
        self.heard_s = now_s
        self.members: dict[int, _Member] = {}


class DynamoFleet:
    """All workers of one component, and their ranks; tells the core of nobody else's.

    `incarnation`: where the ranks' lives are counted from, above that of any earlier process.
    Invariant: who is known here is known to the core, unless somebody took it out there.
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
        self._dirty: set[Rank] = set()
        self._gone = RankCounts()
        self.counts = FleetCounts()
        self.complaints = Complaints()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def worker_ids(self) -> list[int]:
        """Who is known. O(workers)."""
        return list(self._known)

    @property
    def ranks(self) -> Iterator[DynamoRank]:
        """All ranks."""
        return (m.rank for known in self._known.values() for m in known.members.values())

    def rank_counts(self) -> RankCounts:
        """What happened to all ranks, those that are gone included. O(ranks)."""
        return _sum([self._gone, *(rank.counts for rank in self.ranks)])

    def take_events(self, message: EventMessage, now_s: float) -> None:
        """Take what a message says of blocks."""
        for refusal in message.refusals:
            self.complaints.add(f"an event is dropped: {refusal}")
        for event in message.events:
            member = self._heard(event.rank, now_s)
            if member is not None:
                self._complain(event, member.rank.take(event, message, now_s))
                self._dirty.add(event.rank)

    def restore(self, events: Iterable[RouterEvent], now_s: float) -> None:
        """Take a dump of what was held before the events that are still to be had."""
        for event in events:
            member = self._heard(event.rank, now_s)
            if member is not None:
                self.counts.snapshot_events += 1
                self._complain(event, member.rank.restore(event, now_s))
                self._dirty.add(event.rank)

    def take_load(self, load: ActiveLoad, now_s: float, *, may_appear: bool) -> None:
        """Take a load message; whether it may be the first that is heard of its rank."""
        member = self._member(load.rank)
        if member is None and may_appear:
            member = self._heard(load.rank, now_s)
        if member is None:
            self.counts.unknown_loads += 1
            return
        self.hear(load.worker_id, now_s)
        self.counts.loads += 1
        used_blocks = _first(load.kv_used_blocks, load.active_decode_blocks)
        member.gauges = LoadGauges(
            waiting_uncached_tokens=_first(
                load.active_prefill_tokens, member.gauges.waiting_uncached_tokens
            ),
            kv_used_blocks=_first(used_blocks, member.gauges.kv_used_blocks),
        )
        member.is_changed = True
        self._dirty.add(load.rank)

    def hear(self, worker_id: int, now_s: float) -> None:
        """Note a sign of life of a worker, if it is known."""
        known = self._known.get(worker_id)
        if known is not None:
            known.heard_s = now_s

    def hear_all(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for known in self._known.values():
            known.heard_s = now_s

    def require_checkpoint(self, rank: Rank) -> bool:
        """Say again all that a rank holds; False if it is nobody's here."""
        member = self._member(rank)
        if member is None:
            return False
        if member.rank.has_begun:
            member.rank.journal.require_checkpoint()
            self._dirty.add(rank)
        return True

    def tick(self, now_s: float) -> list[Effect]:
        """What time alone brings about: doubts, and workers that are silent for too long."""
        effects: list[Effect] = []
        for worker_id, known in list(self._known.items()):
            if now_s - known.heard_s >= self._settings.silence_s:
                effects += self._core.remove_worker(worker_id, "silent")
                self._forget(worker_id)
                continue
            for member in known.members.values():
                member.rank.tick(now_s)
                if member.said_doubts != member.rank.journal.doubts:
                    self._dirty.add(member.rank.rank)
        return effects

    def take_changed(self) -> list[Rank]:
        """The ranks there is something to tell of, since the last call."""
        changed = list(self._dirty)
        self._dirty.clear()
        return changed

    def take_messages(self, rank: Rank) -> Sequence[LogMessage]:
        """What the index is to be told of a rank's blocks."""
        member = self._member(rank)
        if member is None or not member.rank.has_begun:
            return ()
        return member.rank.journal.take()

    def take_report(self, rank: Rank, now_s: float) -> LoadReport | None:
        """What is to be reported on it once all messages are applied, if that is due."""
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
            self._forget(rank.worker_id)  # somebody took it out: what it says next begins anew
            return None
        return known.members.get(rank.dp_rank)

    def _heard(self, rank: Rank, now_s: float) -> _Member | None:
        """The rank that somebody speaks of; None if there may not be such a one."""
        member = self._member(rank) or self._admit(rank, now_s)
        self.hear(rank.worker_id, now_s)
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
        self._core.upsert_worker(worker, now_s)
        limits, identity = self._settings.limits, self._settings.identity
        life = self._next_incarnation()
        member = _Member(
            DynamoRank(rank, life, identity, limits, self._multiplier, self._settings.naming)
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
        """Far enough from the last one for all the lives that a rank may have."""
        self._incarnation += 1 << 20
        return self._incarnation

    def _forget(self, worker_id: int) -> None:
        known = self._known.pop(worker_id)
        for dp_rank in known.members:
            self._dirty.discard(Rank(worker_id, dp_rank))
        self._gone = _sum([self._gone, *(m.rank.counts for m in known.members.values())])

    def _complain(self, event: RouterEvent, refusal: str | None) -> None:
        if refusal is not None:
            event_id = event.event.event_id
            self.complaints.add(f"rank {event.rank}: event {event_id} is refused: {refusal}")


def _first(value: int | None, otherwise: int | None) -> int:
    return (otherwise or 0) if value is None else value


def _sum(counts: Sequence[RankCounts]) -> RankCounts:
    return RankCounts(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))

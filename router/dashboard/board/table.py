"""The rows of the page's tables, one per worker and per rank, and what changed since last sent.

Rows are small, and equal if they are displayed equally. They are JSON arrays in the order of their
fields. Worker ids are strings, since browsers' integers are exact only up to 2⁵³.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from router.core.core import RouterCore
from router.core.fleet import FleetWorker
from router.core.views.workers import lifecycle
from router.dashboard.board.decision_feed import DecisionFeed
from router.dashboard.board.hit_window import HitWindow, fraction
from router.observability.event_timeline import EventTimeline, Severity
from router.protocol.values import Rank
from router.sequence.rank_table import (
    BUSY,
    DECODE_BLOCKS,
    FOREIGN_REQUESTS,
    PREFILL_TOKENS,
    REQUESTS,
    USED_BLOCKS,
)


class WorkerRow(Struct, frozen=True, array_like=True):
    """A worker's announcement and state; `obstacles`: the reasons why it gets no new requests."""

    worker_id: str
    name: str
    model_name: str
    routing_group: str
    role: str
    endpoint: str
    block_size: int
    capacity_blocks: int
    lifecycle: str
    obstacles: list[str]
    labels: list[str]


class RankRow(Struct, frozen=True, array_like=True):
    """The state of a rank.

    Blocks are counted in each tier that holds them. The hit rates, 0 to 1, are fractions of the
    prompt tokens of about the last minute, null without any: those that we predicted of those that
    we sent, and those that the engine found cached of those that it processed.
    `is_without_events`: it has no event source by choice. `classes`: of a hybrid model, the blocks
    of its windows, states and chunks, in words; null for others.
    """

    worker_id: str
    dp_rank: int
    trust: str
    reason: str | None
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    remote_blocks: int
    used_blocks: int
    requests: int
    foreign_requests: int
    running: int | None
    waiting: int | None
    prefill_tokens: int
    decode_blocks: int
    is_busy: bool
    predicted_hits: float | None
    actual_hits: float | None
    is_without_events: bool
    classes: str | None


WORKER_COLUMNS: Final = WorkerRow.__struct_fields__
RANK_COLUMNS: Final = RankRow.__struct_fields__


def worker_row(core: RouterCore, worker: FleetWorker) -> WorkerRow:
    """Return the row of a worker."""
    announced = worker.announcement
    state, obstacles = lifecycle(core, worker)
    labels = announced.labels
    places = [f"{kind}={place}" for kind, place in sorted(labels.topology_domains.items())]
    return WorkerRow(
        str(announced.worker_id),
        announced.name,
        announced.model_name,
        announced.routing_group,
        announced.role,
        announced.endpoint,
        announced.identity.block_size,
        announced.total_kv_blocks,
        state,
        obstacles,
        [*labels.taints, *places],
    )


def rank_row(
    core: RouterCore, worker: FleetWorker, rank: Rank, hits: HitWindow, now_s: float
) -> RankRow:
    """Return the row of a rank. O(1)."""
    row, trust = core.ranks.row(rank), core.trust(rank, now_s)
    device, host, disk, remote = core.index.held_state(rank).counts
    report = worker.reports.get(rank)
    gauges = None if report is None else report.gauges
    return RankRow(
        str(rank.worker_id),
        rank.dp_rank,
        trust.state.value,
        trust.reason,
        device,
        host,
        disk,
        remote,
        int(row[USED_BLOCKS]),
        int(row[REQUESTS]),
        int(row[FOREIGN_REQUESTS]),
        None if gauges is None else gauges.running_requests,
        None if gauges is None else gauges.waiting_requests,
        int(row[PREFILL_TOKENS]),
        int(row[DECODE_BLOCKS]),
        bool(row[BUSY]),
        hits.predicted,
        hits.actual,
        core.index.is_without_events(rank),
        _classes(core, rank),
    )


def _classes(core: RouterCore, rank: Rank) -> str | None:
    """Return the blocks of each class of a hybrid rank in words, None for other ranks. O(1)."""
    layout = core.index.layout(rank)
    if layout is None:
        return None
    held = [
        f"{each.kind}{f' of {each.span_tokens}' if each.span_tokens else ''}: {blocks}"
        for each, blocks in core.index.class_blocks(rank)
    ]
    return "; ".join([f"resumed at every {layout.alignment_tokens} tokens", *held])


RANKS_A_TURN = 512
"""Ranks read per frame; with more ranks, each is read every few frames."""

SLICE_RANKS = 32
"""Ranks read without a pause: half a millisecond."""

_DOUBTED = ("degraded", "blind", "unreachable")


class Table:
    """Rows by worker and by rank; `has_news` is True once changes go to the timeline."""

    __slots__ = (
        "_changed",
        "_core",
        "_feed",
        "_gone",
        "_hits",
        "_timeline",
        "_to_look_at",
        "_version",
        "has_news",
        "ranks",
        "workers",
    )

    def __init__(self, core: RouterCore, feed: DecisionFeed, timeline: EventTimeline) -> None:
        self._core = core
        self._feed = feed
        self._timeline = timeline
        self.workers: dict[int, WorkerRow] = {}
        self.ranks: dict[Rank, RankRow] = {}
        self._hits: dict[Rank, HitWindow] = {}
        self._changed: dict[int | Rank, WorkerRow | RankRow] = {}
        self._gone: list[int | Rank] = []
        self._to_look_at: list[Rank] = []
        self._version = (-1, -1)
        self.has_news = False

    def look(self, now_s: float) -> Iterator[None]:
        """Read changes, in slices; with an empty table, read all ranks."""
        most = RANKS_A_TURN if self.ranks else len(self._core.ranks)
        self._drop_gone_workers()
        yield
        if not self._to_look_at:
            self._to_look_at = list(self._core.ranks)[::-1]
        for start in range(0, most, SLICE_RANKS):
            for _ in range(min(SLICE_RANKS, most - start, len(self._to_look_at))):
                self._look_at_rank(self._to_look_at.pop(), now_s)
            yield
        self.has_news = True

    def take_changed(self) -> tuple[list[WorkerRow], list[RankRow]]:
        """Return and reset the new and changed rows."""
        changed, self._changed = self._changed.values(), {}
        workers = [each for each in changed if isinstance(each, WorkerRow)]
        return workers, [each for each in changed if isinstance(each, RankRow)]

    def take_gone(self) -> tuple[list[str], list[tuple[str, int]]]:
        """Return and reset the workers and ranks that were removed."""
        gone, self._gone = self._gone, []
        workers = [str(each) for each in gone if isinstance(each, int)]
        ranks = [(str(e.worker_id), e.dp_rank) for e in gone if isinstance(e, Rank)]
        return workers, ranks

    def actual_hits(self) -> tuple[float | None, float]:
        """Return the recent hit rate over all ranks, as found by engines, and of how many tokens.

        O(ranks).
        """
        engine_tokens = cached_tokens = 0.0
        for each in self._hits.values():
            engine_tokens += each.engine_tokens
            cached_tokens += each.cached_tokens
        return fraction(cached_tokens, engine_tokens), engine_tokens

    def _drop_gone_workers(self) -> None:
        """Remove the rows of removed workers and ranks. O(ranks) after a change, else O(1)."""
        version = (self._core.fleet.version, self._core.ranks.version)
        if version == self._version:
            return
        self._version = version
        for worker_id in [each for each in self.workers if self._core.fleet.get(each) is None]:
            del self.workers[worker_id]
            self._changed.pop(worker_id, None)
            self._gone.append(worker_id)
        for rank in [each for each in self.ranks if each not in self._core.ranks]:
            self._forget_rank(rank)
        for rank in [each for each in self._feed.predicted if each not in self._core.ranks]:
            self._feed.take_predicted(rank)

    def _put_worker(self, worker_id: int, line: WorkerRow) -> None:
        known = self.workers.get(worker_id)
        if known == line:
            return
        self.workers[worker_id] = self._changed[worker_id] = line
        if not self.has_news:
            return
        if known is None:
            self._timeline.note("worker_joined", "good", worker_id, "joined")
        elif known.lifecycle != line.lifecycle:
            severity: Severity = "good" if line.lifecycle == "schedulable" else "note"
            text = f"{known.lifecycle} → {line.lifecycle}"
            self._timeline.note("lifecycle", severity, worker_id, text)

    def _look_at_rank(self, rank: Rank, now_s: float) -> None:
        worker = self._core.fleet.get(rank.worker_id)
        if worker is None or rank not in self._core.ranks:
            return
        if rank == worker.announcement.ranks[0]:
            self._put_worker(rank.worker_id, worker_row(self._core, worker))
        hits = self._hits.get(rank)
        if hits is None:
            hits = self._hits[rank] = HitWindow(now_s)
        self._note_hits(worker, rank, hits, now_s)
        line, known = rank_row(self._core, worker, rank, hits, now_s), self.ranks.get(rank)
        if line != known:
            self.ranks[rank] = self._changed[rank] = line
            if known is not None and self.has_news:
                self._note_trust(rank, known, line)

    def _note_hits(self, worker: FleetWorker, rank: Rank, hits: HitWindow, now_s: float) -> None:
        report = worker.reports.get(rank)
        counters = None if report is None else report.counters
        sent_tokens, predicted_tokens = self._feed.take_predicted(rank)
        hits.note(sent_tokens, predicted_tokens, counters, now_s)

    def _note_trust(self, rank: Rank, before: RankRow, after: RankRow) -> None:
        """Record a change of trust in the timeline if it crosses into or out of doubt."""
        was_doubted, is_doubted = before.trust in _DOUBTED, after.trust in _DOUBTED
        if was_doubted == is_doubted:
            return
        text = f"{before.trust} → {after.trust}"
        if is_doubted:
            text = f"{text}: {after.reason}" if after.reason else text
            self._timeline.note("trust_lost", "warning", rank, text)
        else:
            self._timeline.note("trust_regained", "good", rank, text)

    def _forget_rank(self, rank: Rank) -> None:
        del self.ranks[rank]
        self._hits.pop(rank, None)
        self._changed.pop(rank, None)
        self._gone.append(rank)

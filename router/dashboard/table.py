"""The lines of every worker and rank as they were told last, and what has changed since."""

from collections.abc import Iterator

from router.core import RouterCore
from router.dashboard.decision_feed import DecisionFeed
from router.dashboard.hit_window import HitWindow, fraction
from router.dashboard.lines import RankLine, WorkerLine, rank_line, worker_line
from router.fleet import Worker
from router.protocol.values import Rank
from router.timeline import Severity, Timeline

RANKS_A_TURN = 512
"""Ranks looked at from one frame to the next; of more, each is looked at every few frames."""

SLICE_RANKS = 32
"""Looked at without a pause: half a millisecond."""

_DOUBTED = ("degraded", "blind")


class Table:
    """Lines by worker and by rank. `has_news`: from now on the time line hears of changes."""

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

    def __init__(self, core: RouterCore, feed: DecisionFeed, timeline: Timeline) -> None:
        self._core = core
        self._feed = feed
        self._timeline = timeline
        self.workers: dict[int, WorkerLine] = {}
        self.ranks: dict[Rank, RankLine] = {}
        self._hits: dict[Rank, HitWindow] = {}
        self._changed: dict[int | Rank, WorkerLine | RankLine] = {}
        self._gone: list[int | Rank] = []
        self._to_look_at: list[Rank] = []
        self._version = (-1, -1)
        self.has_news = False

    def clear(self) -> None:
        """Forget everything: nobody watches."""
        for each in (self.workers, self.ranks, self._hits, self._changed, self._gone):
            each.clear()
        self._to_look_at.clear()
        self._version = (-1, -1)
        self.has_news = False

    def look(self, now_s: float) -> Iterator[None]:
        """See what has changed, in slices; at a table without lines, all of it."""
        most = RANKS_A_TURN if self.ranks else len(self._core.ranks)
        self._forget_who_is_gone()
        yield
        if not self._to_look_at:
            self._to_look_at = list(self._core.ranks)[::-1]
        for start in range(0, most, SLICE_RANKS):
            for _ in range(min(SLICE_RANKS, most - start, len(self._to_look_at))):
                self._look_at_rank(self._to_look_at.pop(), now_s)
            yield
        self.has_news = True

    def take_changed(self) -> tuple[list[WorkerLine], list[RankLine]]:
        """Lines that are new or different."""
        changed, self._changed = self._changed.values(), {}
        workers = [each for each in changed if isinstance(each, WorkerLine)]
        return workers, [each for each in changed if isinstance(each, RankLine)]

    def take_gone(self) -> tuple[list[str], list[tuple[str, int]]]:
        """Workers and ranks without a line any more."""
        gone, self._gone = self._gone, []
        workers = [str(each) for each in gone if isinstance(each, int)]
        ranks = [(str(e.worker_id), e.dp_rank) for e in gone if isinstance(e, Rank)]
        return workers, ranks

    def hits(self) -> tuple[float | None, float | None]:
        """Of all ranks together, the fraction predicted to be cached, and that found. O(ranks)."""
        sums = [0.0] * 4
        for each in self._hits.values():
            for i, tokens in enumerate(each.sums):
                sums[i] += tokens
        return fraction(sums[1], sums[0]), fraction(sums[3], sums[2])

    def _forget_who_is_gone(self) -> None:
        """O(ranks) where somebody came or went, else O(1)."""
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

    def _put_worker(self, worker_id: int, line: WorkerLine) -> None:
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
            self._put_worker(rank.worker_id, worker_line(self._core, worker))
        hits = self._hits.get(rank)
        if hits is None:
            hits = self._hits[rank] = HitWindow(now_s)
        self._note_hits(worker, rank, hits, now_s)
        line, known = rank_line(self._core, worker, rank, hits, now_s), self.ranks.get(rank)
        if line != known:
            self.ranks[rank] = self._changed[rank] = line
            if known is not None and self.has_news:
                self._note_trust(rank, known, line)

    def _note_hits(self, worker: Worker, rank: Rank, hits: HitWindow, now_s: float) -> None:
        report = worker.reports.get(rank)
        counters = None if report is None else report.counters
        sent_tokens, predicted_tokens = self._feed.take_predicted(rank)
        hits.note(sent_tokens, predicted_tokens, counters, now_s)

    def _note_trust(self, rank: Rank, before: RankLine, after: RankLine) -> None:
        """Only what matters: being a little behind comes and goes."""
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

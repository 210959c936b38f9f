"""What a rank will take how long for, learned from its load reports.

    LoadReport ─▶ counted since the last ─┬─▶ rates of its model ──prior──┐
                                          └─▶ rates of the rank ◀─────────┘
                                                   └─▶ its columns of the RankTable

What an engine does not count is no term of its own: steps and attention are then part of what a
token takes, and decoding takes what it takes elsewhere.
"""

import math

from router.protocol.loads import LoadReport
from router.protocol.values import Rank
from router.scheduler.counted import is_sane
from router.scheduler.learning import LEAST_SPREAD, ModelLearning, RankLearning
from router.scheduler.rates import NOMINAL_S, Vector
from router.scheduler.traffic import Traffic
from router.sequence.rank_table import (
    BASE_S,
    CHUNK_TOKENS,
    CONTEXT_S,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    KV_S,
    MAX_BATCHED_TOKENS,
    QUEUED_TOKENS,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    SLOW_UNTIL_S,
    RankTable,
)

MOST_MODELS = 256
"""Kept for the time their ranks are back; those with ranks are kept anyway."""

UNTAUGHT_S = 1.0
"""Ranks that never worked, or never report, follow their model after so long."""

FIRST_LESSONS = 16
"""Those that a model is taught first change much: such ranks then follow at once."""

_DEFAULT_CHUNK_TOKENS = 8_192
_MOST_PREFILL_SHARE = 0.9
_RATES = slice(BASE_S, KV_S + 1)
_TRAFFIC = slice(REQUESTS_PER_S, REUSE + 1)


class _Model:
    """A model, how many ranks it has, and those of them that taught it nothing yet."""

    __slots__ = ("learning", "ranks", "untaught", "written_s")

    def __init__(self, now_s: float) -> None:
        self.learning = ModelLearning(now_s)
        self.ranks = 0
        self.untaught: dict[Rank, None] = {}
        self.written_s = -math.inf

    def is_to_be_written(self, now_s: float) -> bool:
        """Whether those should be told what it has learned."""
        is_due = now_s >= self.written_s + UNTAUGHT_S or self.learning.lessons < FIRST_LESSONS
        return bool(self.untaught) and is_due


class Predictor:
    """Keeps the columns of a RankTable that load reports decide. Its ranks must be in the table."""

    __slots__ = ("_models", "_ranks", "_table")

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._models: dict[str, _Model] = {}
        self._ranks: dict[Rank, tuple[str, RankLearning]] = {}

    def add(self, rank: Rank, model_name: str, now_s: float) -> None:
        """A rank appeared, and is in none of the models yet: expect what its model is known for."""
        model = self._models.get(model_name)
        if model is None:
            model = self._models[model_name] = _Model(now_s)
        model.ranks += 1
        model.untaught[rank] = None
        learning = RankLearning(model.learning, now_s)
        self._ranks[rank] = (model_name, learning)
        self._table.row(rank)[SLOW_UNTIL_S] = learning.slow_until_s
        self._write_untaught(model, [rank])
        self.note_announced(rank)

    def note_announced(self, rank: Rank) -> None:
        """What a known rank's worker announces may be new."""
        _, learning = self._ranks[rank]
        _write_chunk(self._table.row(rank), learning)

    def drop(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are passed over. What it taught its model remains."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        model_name, _ = known
        model = self._models[model_name]
        model.ranks -= 1
        model.untaught.pop(rank, None)
        if not model.ranks and len(self._models) > MOST_MODELS:
            del self._models[model_name]

    def observe(self, report: LoadReport, now_s: float) -> None:
        """A rank reports. O(1), but once a second for its model's ranks that never worked."""
        rank = report.rank
        known = self._ranks.get(rank)
        if known is None or not is_sane(report.counters):
            return
        model_name, learning = known
        model = self._models[model_name]
        learning.hear(report, now_s)
        row = self._table.row(rank)
        if learning.has_taught:
            model.untaught.pop(rank, None)
            _write_rates(row, learning, report)
        _write_chunk(row, learning)
        _write_traffic(row, learning.traffic)
        _write_foreign(row, learning, report)
        row[SLOW_UNTIL_S] = learning.slow_until_s
        if model.is_to_be_written(now_s):
            model.written_s = now_s
            self._write_untaught(model, list(model.untaught))

    def model_seconds(self, model_name: str) -> Vector:
        """The rates of a model, in the order of their columns; what is usual of an unknown one."""
        model = self._models.get(model_name)
        return NOMINAL_S if model is None else model.learning.rates.seconds

    def rank_seconds(self, rank: Rank) -> Vector:
        """The rates learned of a known rank, in the order of their columns."""
        return self._ranks[rank][1].rates.seconds

    def check_invariants(self) -> None:
        """Assert that rates are sane and ranks are counted. O(everything)."""
        for model_name, model in self._models.items():
            model.learning.rates.check_invariants()
            here = [rank for rank, (name, _) in self._ranks.items() if name == model_name]
            assert model.ranks == len(here)
            assert set(model.untaught) == {r for r in here if not self._ranks[r][1].has_taught}
        for rank, (_, learning) in self._ranks.items():
            learning.rates.check_invariants()
            assert (self._table.row(rank)[_RATES] >= 0).all()

    def _write_untaught(self, model: _Model, ranks: list[Rank]) -> None:
        slots = [self._table.slot(rank) for rank in ranks]
        self._table.values[slots, _RATES] = model.learning.rates.seconds
        self._table.values[slots, RELATIVE_ERROR] = LEAST_SPREAD  # nothing tells them apart


def _write_rates(row: Vector, learning: RankLearning, report: LoadReport) -> None:
    """What an engine counts none of, although it computed prompts, has no rate of its own."""
    counters = report.counters
    row[_RATES] = learning.rates.seconds
    row[RELATIVE_ERROR] = learning.rates.relative_error(learning.work)
    if counters.prefill_tokens and not counters.steps:
        row[BASE_S] = 0.0
    if counters.prefill_tokens and not counters.prefill_token_contexts:
        row[CONTEXT_S] = 0.0


def _write_chunk(row: Vector, learning: RankLearning) -> None:
    row[CHUNK_TOKENS] = learning.chunk_tokens or row[MAX_BATCHED_TOKENS] or _DEFAULT_CHUNK_TOKENS


def _write_traffic(row: Vector, traffic: Traffic) -> None:
    share = min(traffic.prefill_share, _MOST_PREFILL_SHARE)
    row[_TRAFFIC] = traffic.requests_per_s, share, traffic.output_tokens, traffic.reuse


def _write_foreign(row: Vector, learning: RankLearning, report: LoadReport) -> None:
    """An engine that has nothing may as well be one that says nothing: bookings then stand.

    Tokens are never taken away: those of prompts that are being computed are in no gauge.
    """
    gauges = report.gauges
    requests = gauges.running_requests + gauges.waiting_requests
    if not requests:
        row[FOREIGN_REQUESTS] = row[FOREIGN_TOKENS] = 0.0
        return
    tokens = gauges.waiting_uncached_tokens - float(row[QUEUED_TOKENS])
    row[FOREIGN_REQUESTS] = learning.excess_requests.note(requests - float(row[REQUESTS]))
    row[FOREIGN_TOKENS] = max(learning.excess_tokens.note(tokens), 0.0)

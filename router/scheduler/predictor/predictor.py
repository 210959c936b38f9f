"""Predicted times of each rank's work, learned from its load reports and from first tokens.

    LoadReport, PolledLoad ─▶ counted since the last ─┬─▶ rates of its model ──prior──┐
    first tokens ─▶ the fastest of ten ───────────────┴─▶ rates of the rank ◀─────────┘
                                                               └─▶ its columns of the RankTable

Work that an engine does not count has no term of its own: steps and attention are then included in
the time of a token, and decoding takes the time learned from other engines.
"""

import math
from collections.abc import Iterable

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.protocol.values import Rank
from router.scheduler.predictor.rank_model import (
    DEFAULT_CHUNK_TOKENS,
    MOST_TIMED,
    AnyReport,
    RankModel,
    is_sane,
)
from router.scheduler.predictor.rates import Vector
from router.scheduler.predictor.shared_model import LEAST_SPREAD, SharedModel
from router.scheduler.predictor.traffic import Traffic
from router.sequence.active.tracker import FirstToken
from router.sequence.rank_table import (
    BASE_S,
    BURSTS,
    CHUNK_TOKENS,
    COMPLETED_CONTEXTS,
    COMPLETED_TOKENS,
    CONTEXT_S,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    KV_S,
    MAX_BATCHED_TOKENS,
    PREFILL_TOKENS,
    RATE_ERROR,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    SLOW_UNTIL_S,
    RankTable,
)

MOST_MODELS = 256
"""Number of models above which one is dropped when it loses its last rank."""

UNTAUGHT_S = 1.0
"""Interval at which ranks that never worked, or never reported, are updated from their model."""

FIRST_LESSONS = 16
"""Number of a model's first lessons. They change its rates much: such ranks are updated at once."""

_MOST_PREFILL_SHARE = 0.9
_RATES = slice(BASE_S, KV_S + 1)
_TRAFFIC = slice(REQUESTS_PER_S, REUSE + 1)
_NO_LOAD = (LoadCounters(), LoadGauges(), LoadConstants(), None)


class _Model:
    """A model, its number of ranks, and those that have taught it nothing yet."""

    __slots__ = ("learning", "ranks", "untaught", "written_s")

    def __init__(self, now_s: float) -> None:
        self.learning = SharedModel(now_s)
        self.ranks = 0
        self.untaught: dict[Rank, None] = {}
        self.written_s = -math.inf

    def is_to_be_written(self, now_s: float) -> bool:
        """Return whether the untaught ranks are due for the model's rates."""
        is_due = now_s >= self.written_s + UNTAUGHT_S or self.learning.lessons < FIRST_LESSONS
        return bool(self.untaught) and is_due


class Predictor:
    """Owner of the RankTable columns that reports determine. Its ranks must be in the table."""

    __slots__ = ("_models", "_ranks", "_table")

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._models: dict[str, _Model] = {}
        self._ranks: dict[Rank, tuple[str, RankModel]] = {}

    def add(self, rank: Rank, model_name: str, now_s: float) -> None:
        """Add a new rank, with the rates of its model."""
        model = self._models.get(model_name)
        if model is None:
            model = self._models[model_name] = _Model(now_s)
        model.ranks += 1
        model.untaught[rank] = None
        learning = RankModel(model.learning, now_s)
        self._ranks[rank] = (model_name, learning)
        self._table.row(rank)[SLOW_UNTIL_S] = learning.slow_until_s
        self._write_untaught(model, [rank])
        self.note_announced(rank)

    def note_announced(self, rank: Rank) -> None:
        """Apply a new announcement of a known rank's worker."""
        _, learning = self._ranks[rank]
        _write_chunk(self._table.row(rank), learning)

    def drop(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are ignored. Its lessons to its model remain."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        model_name, _ = known
        model = self._models[model_name]
        model.ranks -= 1
        model.untaught.pop(rank, None)
        if not model.ranks and len(self._models) > MOST_MODELS:
            del self._models[model_name]

    def observe(self, report: AnyReport, now_s: float) -> None:
        """Apply a rank's report. O(1), plus the model's untaught ranks once a second.

        A report that says nothing of the load is ignored: the engine is polled, or unknown.
        """
        rank = report.rank
        known = self._ranks.get(rank)
        if known is None or not _is_usable(report):
            return
        model_name, learning = known
        model = self._models[model_name]
        row = self._table.row(rank)
        completed = (float(row[COMPLETED_TOKENS]), float(row[COMPLETED_CONTEXTS]))
        learning.record_report(report, now_s, completed)
        if learning.has_taught:
            model.untaught.pop(rank, None)
            _write_rates(row, learning)
        _write_chunk(row, learning)
        _write_traffic(row, learning.traffic)
        _write_foreign(row, learning, report)
        row[SLOW_UNTIL_S] = learning.slow_until_s
        self._write_due(model, now_s)

    def add_first_tokens(self, tokens: Iterable[tuple[Rank, FirstToken]], now_s: float) -> None:
        """Apply first tokens of prompts that had no other ahead of them."""
        for rank, token in tokens:
            known = self._ranks.get(rank)
            if known is None:
                continue
            model_name, learning = known
            learning.add_first_token(token, now_s)
            if learning.learn_first_tokens(now_s):
                model = self._models[model_name]
                model.untaught.pop(rank, None)
                _write_rates(self._table.row(rank), learning)
                self._write_due(model, now_s)

    def is_measured(self, model_name: str) -> bool:
        """Return whether any work of a model was ever measured."""
        model = self._models.get(model_name)
        return model is not None and model.learning.lessons > 0

    def check_invariants(self) -> None:
        """Assert that rates are valid and ranks are counted. O(ranks)."""
        for model_name, model in self._models.items():
            model.learning.rates.check_invariants()
            here = [rank for rank, (name, _) in self._ranks.items() if name == model_name]
            assert model.ranks == len(here)
            assert set(model.untaught) == {r for r in here if not self._ranks[r][1].has_taught}
        for rank, (_, learning) in self._ranks.items():
            learning.rates.check_invariants()
            assert (self._table.row(rank)[_RATES] >= 0).all()

    def _write_due(self, model: _Model, now_s: float) -> None:
        if model.is_to_be_written(now_s):
            model.written_s = now_s
            self._write_untaught(model, list(model.untaught))

    def _write_untaught(self, model: _Model, ranks: list[Rank]) -> None:
        slots = [self._table.slot(rank) for rank in ranks]
        self._table.values[slots, _RATES] = model.learning.rates.seconds
        self._table.values[slots, RELATIVE_ERROR] = LEAST_SPREAD  # equal rates: no known difference
        self._table.values[slots, RATE_ERROR] = model.learning.relative_error


def _is_usable(report: AnyReport) -> bool:
    """Return whether a report is plausible, and says anything of the load."""
    timed = [each.work for each in report.timed or ()]
    if (report.counters, report.gauges, report.constants, report.timed) == _NO_LOAD:
        return False
    return len(timed) <= MOST_TIMED and all(map(is_sane, (report.counters, *timed)))


def _write_rates(row: Vector, learning: RankModel) -> None:
    """Write the learned rates; 0 for work not counted by an engine that computed prompts."""
    row[_RATES] = learning.seconds
    row[BURSTS] = learning.bursts.count
    row[RELATIVE_ERROR] = row[RATE_ERROR] = learning.rates.relative_error(learning.work)
    if not learning.counts_steps:
        row[BASE_S] = 0.0
    if not learning.counts_contexts:
        row[CONTEXT_S] = 0.0


def _write_chunk(row: Vector, learning: RankModel) -> None:
    row[CHUNK_TOKENS] = learning.chunk_tokens or row[MAX_BATCHED_TOKENS] or DEFAULT_CHUNK_TOKENS


def _write_traffic(row: Vector, traffic: Traffic) -> None:
    share = min(traffic.prefill_share, _MOST_PREFILL_SHARE)
    row[_TRAFFIC] = traffic.requests_per_s, share, traffic.output_tokens, traffic.reuse


def _write_foreign(row: Vector, learning: RankModel, report: AnyReport) -> None:
    """Write the engine's load beyond our bookings; 0 if it reports no requests.

    An idle engine is indistinguishable from one without gauges, so bookings stand. Tokens are never
    negative: no gauge includes the tokens of prompts being computed. Engines count each prompt that
    waits in full, also if it shares blocks with another, so they are compared with such a count.
    """
    gauges = report.gauges
    requests = gauges.running_requests + gauges.waiting_requests
    if not requests:
        row[FOREIGN_REQUESTS] = row[FOREIGN_TOKENS] = 0.0
        return
    tokens = gauges.waiting_uncached_tokens - float(row[PREFILL_TOKENS])
    row[FOREIGN_REQUESTS] = learning.excess_requests.note(requests - float(row[REQUESTS]))
    row[FOREIGN_TOKENS] = max(learning.excess_tokens.note(tokens), 0.0)

"""What a rank will take how long for, learned from its load reports.

    LoadReport ─▶ counted since the last ─┬─▶ rates of its model ──prior──┐
                                          └─▶ rates of the rank ◀─────────┘
                                                   └─▶ its columns of the RankTable

A rank begins with its model's rates, which all ranks of the model teach, and goes back to them when
it has nothing to do: a minute later what was known of it is forgotten. What an engine does not
count is no term of its own: steps and attention are then part of what a token takes, and decoding
takes what it takes elsewhere.
"""

import math

import numpy as np

from router.protocol.loads import LoadCounters, LoadReport
from router.protocol.values import Rank
from router.scheduler.counted import counted_since, is_new_life, is_sane, measured_busy_s
from router.scheduler.rates import NOMINAL_S, Belief, Noise, Rates, Vector, work_of
from router.scheduler.traffic import Excess, Traffic
from router.sequence.rank_table import (
    BASE_S,
    CHUNK_TOKENS,
    CONTEXT_S,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    KV_S,
    MAX_BATCHED_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_S,
    PREFILL_SHARE,
    PREFILL_TOKENS,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    SLOW_START,
    RankTable,
)

IDLE_MEMORY_S = 15.0
"""Without work, what is known of a rank fades to its model's by 1 / e: after 60 s 2 % is left."""

BUSY_MEMORY_S = 200.0
"""The same while it works, for what its work does not show."""

MODEL_MEMORY_S = 3_600.0

SLOW_START_S = 30.0
"""A rank that has never finished a request counts double at first, and as it is after so long."""

_ANYTHING = Belief.around(np.ones(len(NOMINAL_S)), common=10.0, each=5.0)
_COMMON, _EACH = 0.5, 0.2
_EXCUSED = 0.9
"""A rank teaches its model how kinds of work compare; its speed only little by little: else a fleet
of fast and slow ranks would look like one whose work makes no sense.
"""

_MODEL_NOISE = Noise(least=0.02, first=0.05, most=1.0)
_RANK_NOISE = Noise(least=0.01, first=0.05, most=0.5)
_DEFAULT_CHUNK_TOKENS = 8_192
_MOST_PREFILL_SHARE = 0.9
_RATES = slice(BASE_S, KV_S + 1)
_PREFILL, _CONTEXT = PREFILL_S - BASE_S, CONTEXT_S - BASE_S
_WORK_KEPT = 0.8


class _Model:
    """What the ranks of a model have in common; `unheard`: those that never reported."""

    __slots__ = ("_learned_s", "rates", "unheard")

    def __init__(self, now_s: float) -> None:
        self.rates = Rates(_ANYTHING, _MODEL_NOISE)
        self.unheard: dict[Rank, None] = {}
        self._learned_s = now_s

    @property
    def belief(self) -> Belief:
        """What to expect of a rank nothing is known of: it differs from the model, which itself is
        known so well only.
        """
        known = self.rates.belief
        alike = Belief.around(known.mean, _COMMON, _EACH)
        return Belief(known.mean, alike.covariance + known.covariance)

    def learn(self, work: Vector, busy_s: float, now_s: float) -> None:
        """One of its ranks was busy with this work for so long."""
        self.rates.relax(_ANYTHING, math.exp((self._learned_s - now_s) / MODEL_MEMORY_S))
        self._learned_s = now_s
        self.rates.learn(work, busy_s, _ANYTHING)


class _RankState:
    """What one rank was heard to say, and what follows.

    `work` is what it usually does in a second; `slow_until_s`: new before that.
    """

    __slots__ = (
        "_heard_s",
        "_report",
        "excess_requests",
        "excess_tokens",
        "model",
        "rates",
        "slow_until_s",
        "traffic",
        "work",
    )

    def __init__(self, model: _Model, now_s: float) -> None:
        self.model = model
        self.rates = Rates(model.belief, _RANK_NOISE)
        self.traffic = Traffic()
        self.excess_requests = Excess()
        self.excess_tokens = Excess()
        self.work = np.ones(len(NOMINAL_S))
        self.slow_until_s = -math.inf
        self._report: LoadReport | None = None
        self._heard_s = now_s

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Learn from what was counted since the last report."""
        before, elapsed_s = self._report, max(now_s - self._heard_s, 0.0)
        self._report, self._heard_s = report, now_s
        is_new = before is None or is_new_life(before, report)
        if is_new and not report.counters.requests_finished:
            self.slow_until_s = now_s + SLOW_START_S
        counted = counted_since(before, report)
        busy_s = measured_busy_s(before, report, counted, elapsed_s)
        self._learn(work_of(counted), busy_s, elapsed_s, now_s)
        if not is_new:
            self.traffic.add(counted, self._prefill_s(counted), elapsed_s)

    def _learn(self, work: Vector, busy_s: float | None, elapsed_s: float, now_s: float) -> None:
        busy_share_s = min(busy_s or 0.0, elapsed_s)
        faded = (elapsed_s - busy_share_s) / IDLE_MEMORY_S + busy_share_s / BUSY_MEMORY_S
        self.rates.relax(self.model.belief, math.exp(-faded))
        if busy_s and work.any():
            self.work = _WORK_KEPT * self.work + (1 - _WORK_KEPT) * work
            self.model.learn(work, busy_s / self._slowness, now_s)
            self.rates.learn(work, busy_s, self.model.belief)

    @property
    def _slowness(self) -> float:
        """How many times as long as its model it takes, as far as that is known."""
        usual_s = self.model.rates.belief.mean @ self.work
        error = self.rates.relative_error(self.work)
        known = _EXCUSED * _COMMON**2 / (_COMMON**2 + error**2)
        return math.pow(self.rates.belief.mean @ self.work / usual_s, known)

    def _prefill_s(self, counted: LoadCounters) -> float:
        seconds = self.rates.seconds
        tokens_s = counted.prefill_tokens * seconds[_PREFILL]
        return float(tokens_s + counted.prefill_token_contexts * seconds[_CONTEXT])


class Predictor:
    """Keeps the columns of a RankTable that load reports decide. Its ranks must be in the table."""

    __slots__ = ("_models", "_ranks", "_table")

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._models: dict[str, _Model] = {}
        self._ranks: dict[Rank, _RankState] = {}

    def add(self, rank: Rank, model_name: str, now_s: float) -> None:
        """A rank appeared: expect of it what its model is known for."""
        model = self._models.get(model_name)
        if model is None:
            model = self._models[model_name] = _Model(now_s)
        self._ranks[rank] = _RankState(model, now_s)
        model.unheard[rank] = None
        self._write_unheard(model)

    def drop(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are passed over. What it taught its model remains."""
        state = self._ranks.pop(rank, None)
        if state is not None:
            state.model.unheard.pop(rank, None)

    def observe(self, report: LoadReport, now_s: float) -> None:
        """A rank reports. O(1), but for its model's ranks that never did."""
        state = self._ranks.get(report.rank)
        if state is None or not is_sane(report.counters):
            return
        state.model.unheard.pop(report.rank, None)
        state.hear(report, now_s)
        row = self._table.values[self._table.slot(report.rank)]
        _write_rates(row, state, report)
        _write_traffic(row, state.traffic)
        _write_foreign(row, state, report)
        row[SLOW_START] = max(state.slow_until_s - now_s, 0.0) / SLOW_START_S
        self._write_unheard(state.model)

    def model_seconds(self, model_name: str) -> Vector:
        """The rates of a model, in the order of their columns; what is usual of an unknown one."""
        model = self._models.get(model_name)
        return NOMINAL_S if model is None else model.rates.seconds

    def check_invariants(self) -> None:
        """Assert that rates are sane and every unheard rank is known. O(everything)."""
        for model in self._models.values():
            model.rates.check_invariants()
            assert all(self._ranks[rank].model is model for rank in model.unheard)
        for rank, state in self._ranks.items():
            state.rates.check_invariants()
            assert (self._table.values[self._table.slot(rank)][_RATES] >= 0).all()

    def _write_unheard(self, model: _Model) -> None:
        slots = [self._table.slot(rank) for rank in model.unheard]
        if slots:
            values = self._table.values
            values[slots, _RATES] = model.rates.seconds
            values[slots, RELATIVE_ERROR] = _COMMON
            announced = values[slots, MAX_BATCHED_TOKENS]
            values[slots, CHUNK_TOKENS] = np.where(announced > 0, announced, _DEFAULT_CHUNK_TOKENS)


def _write_rates(row: Vector, state: _RankState, report: LoadReport) -> None:
    """What an engine counts none of, although it computed prompts, has no rate of its own."""
    counters = report.counters
    row[_RATES] = state.rates.seconds
    row[RELATIVE_ERROR] = state.rates.relative_error(state.work)
    if counters.prefill_tokens and not counters.steps:
        row[BASE_S] = 0.0
    if counters.prefill_tokens and not counters.prefill_token_contexts:
        row[CONTEXT_S] = 0.0
    announced = row[MAX_BATCHED_TOKENS] or _DEFAULT_CHUNK_TOKENS
    row[CHUNK_TOKENS] = report.constants.chunk_tokens or announced


def _write_traffic(row: Vector, traffic: Traffic) -> None:
    row[REQUESTS_PER_S] = traffic.requests_per_s
    row[PREFILL_SHARE] = min(traffic.prefill_share, _MOST_PREFILL_SHARE)
    row[OUTPUT_TOKENS] = traffic.output_tokens
    row[REUSE] = traffic.reuse


def _write_foreign(row: Vector, state: _RankState, report: LoadReport) -> None:
    """An engine that has nothing may as well be one that says nothing: bookings then stand.

    Tokens are never taken away: those of prompts that are being computed are in no gauge.
    """
    gauges = report.gauges
    requests = gauges.running_requests + gauges.waiting_requests
    if not requests:
        row[FOREIGN_REQUESTS] = row[FOREIGN_TOKENS] = 0.0
        return
    tokens = gauges.waiting_uncached_tokens - row[PREFILL_TOKENS]
    row[FOREIGN_REQUESTS] = state.excess_requests.note(requests - row[REQUESTS])
    row[FOREIGN_TOKENS] = max(state.excess_tokens.note(tokens), 0.0)

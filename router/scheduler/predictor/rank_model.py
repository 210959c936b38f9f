"""The model of one rank's engine: rates and traffic, learned from the work between two reports."""

import math

import numpy as np
from msgspec import structs

from router.protocol.loads import LoadCounters, LoadReport
from router.scheduler.policy._predictive_kernel import SLOW_START_S
from router.scheduler.predictor._rates_kernel import slowness
from router.scheduler.predictor.rates import NOMINAL_S, Noise, Prior, Rates, Vector, work_of
from router.scheduler.predictor.traffic import Excess, Traffic

MOST = 1e18
"""Limit of a report's counters in total: above any real engine's, and safe to compute with."""


def is_sane(counters: LoadCounters) -> bool:
    """Return whether counters are plausible; values from the wire may be anything."""
    values = structs.astuple(counters)
    return bool(min(values) >= 0 and sum(values) <= MOST)  # a sum with NaN is not below


def counted_since(before: LoadReport | None, report: LoadReport) -> LoadCounters:
    """Return the work counted since `before`, or since the start of a restarted engine.

    A restart of the engine alone, without its agent, shows as lower counters. Counters that only
    fluctuate (`requests_received` of some engines) count as 0, never below.
    """
    if before is None or is_new_life(before, report):
        return report.counters
    now, then = structs.astuple(report.counters), structs.astuple(before.counters)
    return LoadCounters(*[max(each - was, 0) for each, was in zip(now, then, strict=True)])


def is_new_life(before: LoadReport, report: LoadReport) -> bool:
    """Return whether the engine, or its agent, restarted in between."""
    now, then = report.counters, before.counters
    return (
        report.agent_incarnation != before.agent_incarnation
        or now.steps < then.steps
        or now.prefill_tokens < then.prefill_tokens
        or now.busy_s < then.busy_s
    )


def measured_busy_s(
    before: LoadReport | None, report: LoadReport, counted: LoadCounters, elapsed_s: float
) -> float | None:
    """Return how long the engine was busy with the counted work. Returns None if unknown.

    If the engine does not measure it: the whole interval, if it had work at both ends.
    """
    if report.counters.busy_s > 0:
        return counted.busy_s
    if before is None or is_new_life(before, report):
        return None
    return elapsed_s if _is_at_work(before) and _is_at_work(report) else None


def _is_at_work(report: LoadReport) -> bool:
    return report.gauges.running_requests + report.gauges.waiting_requests > 0


IDLE_MEMORY_S = 15.0
"""Time constant of an idle rank's return to its model's rates: after 60 s, 2 % is left."""

BUSY_MEMORY_S = 200.0
"""Time constant of the same while the rank works, for rates that its work does not reveal."""

MODEL_MEMORY_S = 3_600.0

_ANYTHING = Prior.around(np.ones(len(NOMINAL_S)), common=10.0, each=5.0)
_DRIFT = Prior.around(np.ones(len(NOMINAL_S)), common=1.0, each=0.5)
"""What a model's rates return to without data. Narrower than `_ANYTHING`: ten seconds of silence
add 5 % to their error, not 50 %, with which any report would be believed."""

_MODEL_NOISE = Noise(least=0.02, first=0.05, most=1.0, ignored=3)
"""A rank is believed to have changed at its second surprise, and returns as soon. Its model, which
all ranks share, is not: three odd reports in a row teach it nothing."""

_RANK_NOISE = Noise(least=0.01, first=0.05, most=0.5)

LEAST_SPREAD, _MOST_SPREAD = 0.03, 0.5
"""Limits of the spread of a model's ranks: a relative standard deviation."""

_SPREAD_GAIN = 0.01
_EACH = 0.4
"""Part of a rank's difference from its model that is independent for each rate."""

_EXCUSED = 0.9
"""Part of a rank's slowness that is removed from what it teaches its model. The model thus learns
how kinds of work compare, and its speed only slowly; otherwise a fleet of fast and slow ranks would
look like inconsistent data.
"""

_WORK_KEPT = 0.8
_PREFILL, _CONTEXT = 1, 2


class SharedModel:
    """The rates that the ranks of a model have in common, and the spread between the ranks.

    `lessons`: number of times the ranks taught the model.
    """

    __slots__ = ("_learned_s", "_spread", "lessons", "rates")

    def __init__(self, now_s: float) -> None:
        self.rates = Rates(_ANYTHING, _MODEL_NOISE)
        self._learned_s = now_s
        self._spread = _MOST_SPREAD**2
        self.lessons = 0

    @property
    def prior(self) -> Prior:
        """The expected rates of an unknown rank: its model's, with the spread of the ranks."""
        return self._varied(self.error)

    @property
    def error(self) -> float:
        """The relative standard error of the expected rates of an unknown rank."""
        return math.sqrt(self._spread)

    @property
    def anything(self) -> Prior:
        """The expected rates of a rank that has changed."""
        return self._varied(_MOST_SPREAD)

    def note_slowness(self, slowness: float) -> None:
        """Update the spread of the ranks: a running mean of squared logarithms."""
        square = min(math.log(slowness) ** 2, _MOST_SPREAD**2)
        self._spread = max(self._spread + _SPREAD_GAIN * (square - self._spread), LEAST_SPREAD**2)

    def learn(self, work: Vector, busy_s: float, now_s: float) -> None:
        """Learn from a rank that was busy with this work for `busy_s`."""
        self.rates.relax(_DRIFT, math.exp((self._learned_s - now_s) / MODEL_MEMORY_S))
        self._learned_s = now_s
        self.rates.learn(work, busy_s, _ANYTHING)
        self.lessons += 1

    def _varied(self, error: float) -> Prior:
        return Prior(self.rates.mean, self.rates.covariance, error, _EACH * error)


class RankModel:
    """The reports of one rank, and the rates and traffic derived from them.

    `has_taught`: True once it has worked; until then its rates are its model's. `work`: its usual
    work in one second. `slow_until_s`: end of the slow start, counted from when the rank appeared
    or restarted; 0 if its first report contains finished requests.
    """

    __slots__ = (
        "_last_seen_s",
        "_report",
        "excess_requests",
        "excess_tokens",
        "has_taught",
        "model",
        "rates",
        "slow_until_s",
        "traffic",
        "work",
    )

    def __init__(self, model: SharedModel, now_s: float) -> None:
        self.model = model
        self.rates = Rates(model.prior, _RANK_NOISE)
        self.traffic = Traffic()
        self.excess_requests = Excess()
        self.excess_tokens = Excess()
        self.has_taught = False
        self.work = np.ones(len(NOMINAL_S))
        self.slow_until_s = now_s + SLOW_START_S
        self._report: LoadReport | None = None
        self._last_seen_s = now_s

    @property
    def chunk_tokens(self) -> int | None:
        """The most tokens of one step; None if the rank does not report it."""
        return None if self._report is None else self._report.constants.chunk_tokens

    def record_report(self, report: LoadReport, now_s: float) -> None:
        """Learn from the work counted since the last report."""
        before, elapsed_s = self._report, max(now_s - self._last_seen_s, 0.0)
        self._report, self._last_seen_s = report, now_s
        is_new = before is None or is_new_life(before, report)
        if is_new and report.counters.requests_finished:
            self.slow_until_s = 0.0
        elif is_new and before is not None:
            self.slow_until_s = now_s + SLOW_START_S
        counted = counted_since(before, report)
        busy_s = measured_busy_s(before, report, counted, elapsed_s)
        self._learn(work_of(counted), busy_s, elapsed_s, now_s)
        if not is_new:
            self.traffic.add(counted, self._prefill_s(counted), elapsed_s)

    def _learn(self, work: Vector, busy_s: float | None, elapsed_s: float, now_s: float) -> None:
        busy_share_s = min(busy_s or 0.0, elapsed_s)
        faded = (elapsed_s - busy_share_s) / IDLE_MEMORY_S + busy_share_s / BUSY_MEMORY_S
        self.rates.relax(self.model.prior, math.exp(-faded) if self.has_taught else 0.0)
        if busy_s and any(work.tolist()):
            self.has_taught = True
            slower = self._slowness(work)
            self.model.note_slowness(slower)
            self.model.learn(work, busy_s / slower, now_s)
            self.rates.learn(work, busy_s, self.model.anything)

    def _slowness(self, work: Vector) -> float:
        """Return the rank's time for its usual work, relative to its model's; near 1 if uncertain.

        Adds `work` to the usual work.
        """
        mean, covariance = self.rates.mean, self.rates.covariance
        usual = (self.work, work, _WORK_KEPT, self.model.rates.mean)
        return slowness(*usual, mean, covariance, _EXCUSED, _MOST_SPREAD)

    def _prefill_s(self, counted: LoadCounters) -> float:
        seconds = self.rates.seconds.tolist()
        tokens_s = counted.prefill_tokens * seconds[_PREFILL]
        return float(tokens_s + counted.prefill_token_contexts * seconds[_CONTEXT])

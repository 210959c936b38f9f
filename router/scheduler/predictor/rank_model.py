"""The model of one rank's engine: rates and traffic, learned from the work between two reports."""

import math
from typing import TypeAlias

import numpy as np
from msgspec import structs

from router.protocol.loads import LoadCounters, LoadReport, PolledLoad, TimedWork
from router.scheduler.policy._predicted_parts import MEASURED_BURSTS, SLOW_START_S
from router.scheduler.predictor._rates_kernel import slowness
from router.scheduler.predictor.busy_clock import BusyClock
from router.scheduler.predictor.first_tokens import GUARDED, FirstTokens
from router.scheduler.predictor.rates import NOMINAL_S, Noise, Rates, Vector, work_of
from router.scheduler.predictor.shared_model import MOST_SPREAD, Deviation, SharedModel
from router.scheduler.predictor.traffic import Excess, PromptContexts, Traffic
from router.scheduler.predictor.warm_up import WarmUp
from router.sequence.active.tracker import FirstToken

AnyReport: TypeAlias = LoadReport | PolledLoad

MOST = 1e18
"""Limit of a report's counters in total: above any real engine's, and safe to compute with."""


def is_sane(counters: LoadCounters) -> bool:
    """Return whether counters are plausible; values from the wire may be anything."""
    values = structs.astuple(counters)
    return bool(min(values) >= 0 and sum(values) <= MOST)  # a sum with NaN is not below


MOST_TIMED = 4
"""Limit of the kinds of timed work in a report."""


def counted_since(before: AnyReport | None, report: AnyReport) -> LoadCounters:
    """Return the work counted since `before`, or since the start of a restarted engine.

    A restart of the engine alone, without its agent, shows as lower counters. Counters that only
    fluctuate (`requests_received` of some engines) count as 0, never below.
    """
    if before is None or is_new_life(before, report):
        return report.counters
    return _difference(report.counters, before.counters)


def timed_since(before: AnyReport | None, report: AnyReport) -> list[TimedWork]:
    """Return the timed work since `before`; none in the first report of a life."""
    if before is None or is_new_life(before, report):
        return []
    pairs = zip(report.timed or (), before.timed or (), strict=False)
    return [
        TimedWork(_difference(now.work, then.work), now.error) for now, then in pairs if now != then
    ]


def _difference(now: LoadCounters, then: LoadCounters) -> LoadCounters:
    pairs = zip(structs.astuple(now), structs.astuple(then), strict=True)
    return LoadCounters(*[max(each - was, 0) for each, was in pairs])


def is_new_life(before: AnyReport, report: AnyReport) -> bool:
    """Return whether the engine, or its agent, restarted in between."""
    now, then = report.counters, before.counters
    return (
        report.life != before.life
        or now.steps < then.steps
        or now.prefill_tokens < then.prefill_tokens
        or now.busy_s < then.busy_s
    )


def measured_busy_s(
    before: AnyReport | None, report: AnyReport, counted: LoadCounters, elapsed_s: float
) -> float | None:
    """Return how long the engine was busy with the counted work. Returns None if unknown.

    If the engine does not measure it: the whole interval, if it had work at both ends.
    """
    if report.counters.busy_s > 0:
        return counted.busy_s
    if before is None or is_new_life(before, report):
        return None
    return elapsed_s if _is_at_work(before) and _is_at_work(report) else None


def _is_at_work(report: AnyReport) -> bool:
    return report.gauges.running_requests + report.gauges.waiting_requests > 0


IDLE_MEMORY_S = 15.0
"""Time constant of an idle rank's return to its model's rates: after 60 s, 2 % is left."""

BUSY_MEMORY_S = 200.0
"""Time constant of the same while the rank works, for rates that its work does not reveal."""

_RANK_NOISE = Noise(least=0.01, first=0.05, most=0.5)

_EXCUSED = 0.9
"""Part of a rank's slowness that is removed from what it teaches its model. The model thus learns
how kinds of work compare, and its speed only slowly; otherwise a fleet of fast and slow ranks would
look like inconsistent data.
"""

BURST_S = 5.0
"""Time after which work that continues counts as another burst."""

PLAUSIBLE = 3.0
"""Factor between a rank's rates and its model's that one burst of work makes believable."""

DEFAULT_CHUNK_TOKENS = 8_192

_WORK_KEPT = 0.8
_PREFILL, _CONTEXT = 1, 2


class Bursts:
    """The separate bursts of work by which a rank's rates were measured.

    `count`: their number since the rank started or changed.
    """

    __slots__ = ("_began_s", "count")

    def __init__(self) -> None:
        self.count = 0
        self._began_s = -math.inf

    def note(self, now_s: float) -> None:
        """Count a burst of work, unless the last one continues."""
        if now_s >= self._began_s + BURST_S:
            self.count, self._began_s = self.count + 1, now_s

    def end(self) -> None:
        """End the present burst: the engine is idle."""
        self._began_s = -math.inf

    def restart(self) -> None:
        """Forget all bursts: they measured another engine."""
        self.count = 0
        self.end()


class RankModel:
    """The reports of one rank, and the rates and traffic derived from them.

    `has_taught`: True once it has worked; until then its rates are its model's. `bursts`: of the
    work that its rates were measured by. `work`: its usual work in one second. `slow_until_s`: end
    of the slow start, counted from when the rank appeared or restarted; 0 if its first report
    contains finished requests.
    """

    __slots__ = (
        "_clock",
        "_contexts",
        "_deviation",
        "_first_tokens",
        "_last_seen_s",
        "_report",
        "_warm_up",
        "bursts",
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
        self.bursts = Bursts()
        self._warm_up = WarmUp()
        self._clock = BusyClock()
        self._deviation = Deviation()
        self._contexts = PromptContexts()
        self.work = np.ones(len(NOMINAL_S))
        self.slow_until_s = now_s + SLOW_START_S
        self._report: AnyReport | None = None
        self._last_seen_s = now_s
        self._first_tokens = FirstTokens()

    @property
    def seconds(self) -> Vector:
        """The rates to predict by, in seconds per unit, in the order of `NOMINAL_S`.

        Until MEASURED_BURSTS of work have measured the rank, each burst makes a factor of PLAUSIBLE
        beside its model's rates believable: one burst may be unlike all others.
        """
        if self.bursts.count >= MEASURED_BURSTS:
            return self.rates.seconds
        most = PLAUSIBLE**self.bursts.count
        usual = self.model.rates.seconds
        return np.clip(self.rates.seconds, usual / most, usual * most)

    @property
    def chunk_tokens(self) -> int | None:
        """The most tokens of one step; None if the rank does not report it."""
        return None if self._report is None else self._report.constants.chunk_tokens

    def record_report(
        self, report: AnyReport, now_s: float, completed: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Learn from the work counted since the last report.

        `completed`: the tokens computed for prompts that we booked there, and their attention work.
        """
        before, elapsed_s = self._report, max(now_s - self._last_seen_s, 0.0)
        self._report, self._last_seen_s = report, now_s
        is_new = before is None or is_new_life(before, report)
        if is_new:
            self._begin_life(report, now_s, is_first=before is None)
        counted = counted_since(before, report)
        if report.timed is None:
            busy_s = self._busy_s(before, report, counted, elapsed_s)
            self._fade(busy_s or 0.0, elapsed_s)
            if not busy_s:
                self.bursts.end()
            elif not self._warm_up.is_first(counted):
                self._learn(work_of(counted), busy_s, now_s)
        else:
            self._fade(elapsed_s if _is_at_work(report) else 0.0, elapsed_s)
            if not _is_at_work(report):
                self.bursts.end()
            self._learn_timed(timed_since(before, report), now_s, completed)
            self.learn_first_tokens(now_s)
        if not is_new:
            self.traffic.add(counted, self._prefill_s(counted), elapsed_s)

    def _begin_life(self, report: AnyReport, now_s: float, *, is_first: bool) -> None:
        """Forget what is not known of an engine that appeared, or restarted."""
        finished = report.counters.requests_finished
        self._first_tokens.restart(finished)
        self._warm_up.restart(is_warm=finished >= GUARDED)
        self.bursts.restart()
        if finished:
            self.slow_until_s = 0.0
        elif not is_first:
            self.slow_until_s = now_s + SLOW_START_S

    def _learn_timed(
        self, timed: list[TimedWork], now_s: float, completed: tuple[float, float]
    ) -> None:
        """Learn from work with a known duration, with the contexts of our own prompts."""
        if not timed:
            return
        self._contexts.note(*completed)
        mean_tokens = self._contexts.mean_tokens
        for each in timed:
            work = each.work
            if mean_tokens is not None and self.counts_contexts:
                contexts = work.prefill_tokens * mean_tokens
                work = structs.replace(work, prefill_token_contexts=contexts)
            self._learn(work_of(work), work.busy_s, now_s, each.error)

    def _busy_s(
        self,
        before: AnyReport | None,
        report: AnyReport,
        counted: LoadCounters,
        elapsed_s: float,
    ) -> float | None:
        """Return how long the engine was busy, by our clock. Returns None if unknown."""
        busy_s = measured_busy_s(before, report, counted, elapsed_s)
        if before is None or is_new_life(before, report):
            self._clock.skip()
        elif report.counters.busy_s > 0:
            self._clock.note(before.gauges, counted, elapsed_s)
        return None if busy_s is None else busy_s * self._clock.factor

    def add_first_token(self, token: FirstToken, now_s: float) -> None:
        """Note a first token, unless the engine measures the time of its work itself."""
        if self._report is None or self._report.timed is not None:
            predicted_s = float(self.rates.mean @ self._work_before(token))
            self._first_tokens.add(token, token.waited_s / predicted_s, now_s)

    def learn_first_tokens(self, now_s: float) -> bool:
        """Learn from first tokens that are to be compared now. Returns whether there were any."""
        fastest = self._first_tokens.take(now_s)
        for each in fastest:
            work = self._work_before(each.token)
            self._learn(work, each.token.waited_s, now_s, each.error)
        return bool(fastest)

    def _work_before(self, token: FirstToken) -> Vector:
        """Return the work until a first token.

        If requests decode, the prompt waits for half a step of theirs, on average.
        """
        chunk_tokens = self.chunk_tokens or DEFAULT_CHUNK_TOKENS
        steps = math.ceil(token.tokens / chunk_tokens) + (0.5 if token.requests else 0.0)
        return NOMINAL_S * (
            steps,
            token.tokens,
            token.contexts if self.counts_contexts else 0.0,
            steps * token.requests,
            steps * token.kv_tokens,
        )

    @property
    def counts_steps(self) -> bool:
        """False if reported prompts have no steps, whose time is then that of other work."""
        prefill_tokens, steps, _ = self._reported
        return bool(steps or not prefill_tokens)

    @property
    def counts_contexts(self) -> bool:
        """False if reported prompts have no attention work, whose time is then that of tokens."""
        prefill_tokens, _, contexts = self._reported
        return bool(contexts or not prefill_tokens)

    @property
    def _reported(self) -> tuple[int, int, float]:
        """The prompt tokens, steps and attention work from which rates are learned."""
        report = self._report
        if report is None:
            return 0, 0, 0.0
        counters = [report.counters]
        if report.timed is not None:
            counters = [each.work for each in report.timed]
        tokens, steps = sum(c.prefill_tokens for c in counters), sum(c.steps for c in counters)
        return tokens, steps, sum(each.prefill_token_contexts for each in counters)

    def _fade(self, busy_s: float, elapsed_s: float) -> None:
        """Return to the model's rates, as time passes without, or with, work."""
        busy_s = min(busy_s, elapsed_s)
        faded = (elapsed_s - busy_s) / IDLE_MEMORY_S + busy_s / BUSY_MEMORY_S
        self.rates.relax(self.model.prior_of(self._deviation), self._kept(math.exp(-faded)))

    def _kept(self, kept: float) -> float:
        """Return the part of what is known of this rank that is kept, at most `kept`.

        Less of it where its model is known better, so that what a rank learned by itself before
        its model was known does not outlast it.
        """
        if not self.has_taught:
            return 0.0
        own = self.rates.relative_error(self.work)
        expected = self.model.error_of(self._deviation, self.work)
        return kept * min(1.0, (expected / own) ** 2) if own > 0 else kept

    def _learn(self, work: Vector, busy_s: float | None, now_s: float, error: float = 0.0) -> None:
        if busy_s and any(work.tolist()):
            self.has_taught = True
            error = self._noisy(work, busy_s, error)
            slower = self._slowness(work)
            self.model.learn(work, busy_s / slower, now_s, error)
            if self.rates.learn(work, busy_s, self.model.anything, error):
                self.bursts.restart()
                self._deviation = Deviation()
            self.bursts.note(now_s)

    def _noisy(self, work: Vector, busy_s: float, error: float) -> float:
        """Return the error of a report, with what the reports of all ranks vary by."""
        self.model.note_deviation(self._deviation, work, busy_s, error)
        predicted_s = float(self.rates.mean @ work)
        surprise = (busy_s - predicted_s) / min(busy_s, predicted_s)
        known = self.rates.relative_error(work)
        return math.hypot(error, self.model.note_surprise(surprise, known**2 + error**2))

    def _slowness(self, work: Vector) -> float:
        """Return the rank's time for its usual work, relative to its model's; near 1 if uncertain.

        Adds `work` to the usual work.
        """
        mean, covariance = self.rates.mean, self.rates.covariance
        usual = (self.work, work, _WORK_KEPT, self.model.rates.mean)
        return slowness(*usual, mean, covariance, _EXCUSED, MOST_SPREAD)

    def _prefill_s(self, counted: LoadCounters) -> float:
        seconds = self.rates.seconds.tolist()
        tokens_s = counted.prefill_tokens * seconds[_PREFILL]
        return float(tokens_s + counted.prefill_token_contexts * seconds[_CONTEXT])

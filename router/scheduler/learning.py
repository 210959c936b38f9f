"""What is learned of a rank and of its model, report by report.

A rank begins with its model's rates, which all ranks of the model teach, and goes back to them when
it has nothing to do: a minute later what was known of it is forgotten. How much it may differ from
them is learned as well, from how much ranks do differ.
"""

import math

import numpy as np

from router.protocol.loads import LoadCounters, LoadReport
from router.scheduler._predictive_kernel import SLOW_START_S
from router.scheduler._rates_kernel import slowness
from router.scheduler.counted import counted_since, is_new_life, measured_busy_s
from router.scheduler.rates import NOMINAL_S, Noise, Prior, Rates, Vector, work_of
from router.scheduler.traffic import Excess, Traffic

IDLE_MEMORY_S = 15.0
"""Without work, what is known of a rank fades to its model's by 1 / e: after 60 s 2 % is left."""

BUSY_MEMORY_S = 200.0
"""The same while it works, for what its work does not show."""

MODEL_MEMORY_S = 3_600.0

_ANYTHING = Prior.around(np.ones(len(NOMINAL_S)), common=10.0, each=5.0)
_MODEL_NOISE = Noise(least=0.02, first=0.05, most=1.0)
_RANK_NOISE = Noise(least=0.01, first=0.05, most=0.5)

LEAST_SPREAD, _MOST_SPREAD = 0.03, 0.5
"""Of how far ranks of a model differ: a relative standard deviation."""

_SPREAD_GAIN = 0.01
_EACH = 0.4
"""Of the factor by which a rank differs from its model, so much is different for each rate."""

_EXCUSED = 0.9
"""A rank teaches its model how kinds of work compare; its speed only little by little: else a fleet
of fast and slow ranks would look like one whose work makes no sense.
"""

_WORK_KEPT = 0.8
_PREFILL, _CONTEXT = 1, 2


class ModelLearning:
    """What the ranks of a model have in common, and how far they differ. `lessons`: how often they
    taught it.
    """

    __slots__ = ("_learned_s", "_spread", "lessons", "rates")

    def __init__(self, now_s: float) -> None:
        self.rates = Rates(_ANYTHING, _MODEL_NOISE)
        self._learned_s = now_s
        self._spread = _MOST_SPREAD**2
        self.lessons = 0

    @property
    def prior(self) -> Prior:
        """What to expect of a rank nothing is known of: it differs from the model as its ranks do
        from each other, and the model is known so well only.
        """
        return self._varied(self.error)

    @property
    def error(self) -> float:
        """Relative standard error of what is expected of such a rank."""
        return math.sqrt(self._spread)

    @property
    def anything(self) -> Prior:
        """What to expect of a rank that has changed."""
        return self._varied(_MOST_SPREAD)

    def note_slowness(self, slowness: float) -> None:
        """How far its ranks differ: a running mean of squared logarithms."""
        square = min(math.log(slowness) ** 2, _MOST_SPREAD**2)
        self._spread = max(self._spread + _SPREAD_GAIN * (square - self._spread), LEAST_SPREAD**2)

    def learn(self, work: Vector, busy_s: float, now_s: float) -> None:
        """One of its ranks was busy with this work for so long."""
        self.rates.relax(_ANYTHING, math.exp((self._learned_s - now_s) / MODEL_MEMORY_S))
        self._learned_s = now_s
        self.rates.learn(work, busy_s, _ANYTHING)
        self.lessons += 1

    def _varied(self, error: float) -> Prior:
        return Prior(self.rates.mean, self.rates.covariance, error, _EACH * error)


class RankLearning:
    """What one rank was heard to say, and what follows.

    `has_taught`: whether it ever worked; until then its rates are its model's. `work` is what it
    usually does in a second; `slow_until_s`: new before that, from when it
    appeared or began anew, unless it says that it has finished requests.
    """

    __slots__ = (
        "_heard_s",
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

    def __init__(self, model: ModelLearning, now_s: float) -> None:
        self.model = model
        self.rates = Rates(model.prior, _RANK_NOISE)
        self.traffic = Traffic()
        self.excess_requests = Excess()
        self.excess_tokens = Excess()
        self.has_taught = False
        self.work = np.ones(len(NOMINAL_S))
        self.slow_until_s = now_s + SLOW_START_S
        self._report: LoadReport | None = None
        self._heard_s = now_s

    @property
    def chunk_tokens(self) -> int | None:
        """What a step of its computes at most, where it says so."""
        return None if self._report is None else self._report.constants.chunk_tokens

    def hear(self, report: LoadReport, now_s: float) -> None:
        """Learn from what was counted since the last report."""
        before, elapsed_s = self._report, max(now_s - self._heard_s, 0.0)
        self._report, self._heard_s = report, now_s
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
        """How many times as long as its model it takes for its usual work, of which this is some,
        as far as that is known.
        """
        mean, covariance = self.rates.mean, self.rates.covariance
        usual = (self.work, work, _WORK_KEPT, self.model.rates.mean)
        return slowness(*usual, mean, covariance, _EXCUSED, _MOST_SPREAD)

    def _prefill_s(self, counted: LoadCounters) -> float:
        seconds = self.rates.seconds.tolist()
        tokens_s = counted.prefill_tokens * seconds[_PREFILL]
        return float(tokens_s + counted.prefill_token_contexts * seconds[_CONTEXT])

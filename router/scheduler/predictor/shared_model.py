"""The rates that a model's ranks share, the spread between ranks, and the noise of their reports.

    log(reported time / the model's) = the rank's deviation + the noise of the report

Both are learned, and apart: that single reports scatter does not mean that the ranks differ. Ranks
are taken for alike until the mean of several reports of one is further from the others' than noise
explains. Noise is learned from all ranks together, and separately for reports that are slower and
faster than expected: pauses and compilation only add time, so that slow reports are believed less
where many are slow, and the fast ones show what the engines can do.
"""

import math

import numpy as np

from router.scheduler.predictor._rates_kernel import SURPRISING
from router.scheduler.predictor.rates import NOMINAL_S, Noise, Prior, Rates, Vector

MODEL_MEMORY_S = 3_600.0

_ANYTHING = Prior.around(np.ones(len(NOMINAL_S)), common=10.0, each=5.0)
_DRIFT = Prior.around(np.ones(len(NOMINAL_S)), common=1.0, each=0.5)
"""What a model's rates return to without data. Narrower than `_ANYTHING`: ten seconds of silence
add 5 % to their error, not 50 %, with which any report would be believed."""

_MODEL_NOISE = Noise(least=0.02, first=0.15, most=1.0, ignored=3)
"""A rank is believed to have changed at its second surprise, and returns as soon. Its model, which
all ranks share, is not: three odd reports in a row teach it nothing. Its noise is large at first:
the first reports come from ranks whose own speeds are not known yet."""

_REPORT_NOISE = Noise(least=0.01, first=0.25, most=2.0)
"""Of the reports of all ranks, beside the stated error of each."""

_NOISE_GAIN = 0.5

LEAST_SPREAD, FIRST_SPREAD, MOST_SPREAD = 0.03, 0.3, 0.5
"""Limits of the spread of a model's ranks, a relative standard deviation; what it is at first."""

_SPREAD_GAIN = 0.01
_EACH = 0.4
"""Part of a rank's difference from its model that is independent for each rate."""

_MOST_DEVIATION = 1.5
"""Limit of the logarithm of one report, and of the means."""

_MOST_EVIDENT = 1.0

_MOST_SURPRISE = 1e6
"""Limit of one surprise, far above what counts."""

DEVIATION_REPORTS = 16
"""Number of the last reports that a rank's deviation is the mean of, about."""

LEAST_REPORTS = 3
"""Number of reports before which no deviation is evident."""

_EVIDENT = 2.5
"""Standard errors from which on a deviation is evident."""

_USUAL_GAIN = 0.05

_KNOWN_MODEL = 0.5
"""Relative error of a model's time above which its ranks cannot be compared with it."""


class Deviation:
    """The distance of one rank's reports from its model's times, on average.

    `mean`: of logarithms, relative to all ranks. `evident`: its absolute value, or 0 if noise
    explains it. `reports`: number of those it is the mean of.
    """

    __slots__ = ("_variance", "evident", "mean", "reports")

    def __init__(self) -> None:
        self.mean = 0.0
        self.evident = 0.0
        self.reports = 0
        self._variance = 0.0

    def note(self, deviation: float, variance: float) -> None:
        """Add a report with this variance of its noise."""
        self.reports = min(self.reports + 1, DEVIATION_REPORTS)
        self.mean += (deviation - self.mean) / self.reports
        self._variance += (variance - self._variance) / self.reports
        chance = _EVIDENT * math.sqrt(self._variance / self.reports)
        is_evident = self.reports >= LEAST_REPORTS and abs(self.mean) > chance
        self.evident = min(abs(self.mean), _MOST_EVIDENT) if is_evident else 0.0


class SharedModel:
    """The rates that the ranks of a model have in common, and the spread between the ranks.

    `lessons`: number of times the ranks taught the model. `_usual`, `_variance`: of the logarithms
    of reported by expected times, the mean over all ranks and the variance within one. `_faster`,
    `_slower`: the variances of reports on either side of what their ranks predict.
    """

    __slots__ = (
        "_faster",
        "_learned_s",
        "_slower",
        "_spread",
        "_usual",
        "_variance",
        "lessons",
        "rates",
    )

    def __init__(self, now_s: float) -> None:
        self.rates = Rates(_ANYTHING, _MODEL_NOISE)
        self.lessons = 0
        self._learned_s = now_s
        self._spread = FIRST_SPREAD**2
        self._usual = 0.0
        self._variance = self._faster = self._slower = _REPORT_NOISE.first**2

    @property
    def prior(self) -> Prior:
        """The expected rates of an unknown rank: its model's, with the spread of the ranks."""
        return self._varied(self.error)

    @property
    def error(self) -> float:
        """The relative standard error of the expected rates of an unknown rank."""
        return math.sqrt(self._spread)

    @property
    def relative_error(self) -> float:
        """The standard error of an unknown rank's predicted times, as a fraction.

        That of the model's own rates, of which little may be known, and the spread of the ranks.
        """
        return math.hypot(self.rates.relative_error(np.ones(len(NOMINAL_S))), self.error)

    @property
    def anything(self) -> Prior:
        """The expected rates of a rank that has changed."""
        return self._varied(MOST_SPREAD)

    def prior_of(self, rank: Deviation) -> Prior:
        """Return the expected rates of a rank: as far from its model's as is evident."""
        return self._varied(max(self.error, rank.evident))

    def error_of(self, rank: Deviation, work: Vector) -> float:
        """Return the relative standard error of the time that this prior predicts for `work`."""
        prior = self.prior_of(rank)
        return math.hypot(self.rates.relative_error(work), prior.common, prior.each)

    def note_deviation(self, rank: Deviation, work: Vector, busy_s: float, error: float) -> None:
        """Compare a rank's report with the model, and update the spread of the ranks by it."""
        if self.rates.relative_error(work) > _KNOWN_MODEL:
            return
        logarithm = math.log(busy_s / float(self.rates.mean @ work))
        deviation = logarithm - self._usual
        limit = SURPRISING * math.sqrt(self._variance)
        rest = _limited(deviation - (rank.mean if rank.reports > 1 else 0.0), limit)
        rank.note(_limited(deviation, _MOST_DEVIATION), self._variance + error**2)
        self._usual += _USUAL_GAIN * _limited(deviation, limit)
        variance = self._variance + _USUAL_GAIN * (rest**2 - self._variance)
        self._variance = max(variance, _REPORT_NOISE.least**2)
        square = min(rank.evident, MOST_SPREAD) ** 2
        self._spread = max(self._spread + _SPREAD_GAIN * (square - self._spread), LEAST_SPREAD**2)

    def note_surprise(self, surprise: float, explained: float) -> float:
        """Return the standard deviation of reports on this side of what their ranks predict.

        `surprise`: the difference, relative to the shorter time, of which the variance `explained`
        is not noise. One surprise counts at most SURPRISING times what is usual.
        """
        noise = self._slower if surprise > 0 else self._faster
        square = _limited(surprise, _MOST_SURPRISE) ** 2
        unexplained = min(max(square - explained, 0.0), SURPRISING**2 * noise)
        noise += _NOISE_GAIN * noise / (noise + explained) * (unexplained - noise)
        noise = min(max(noise, _REPORT_NOISE.least**2), _REPORT_NOISE.most**2)
        if surprise > 0:
            self._slower = noise
        else:
            self._faster = noise
        return math.sqrt(noise)

    def learn(self, work: Vector, busy_s: float, now_s: float, error: float = 0.0) -> None:
        """Learn from a rank that was busy with this work for `busy_s`; see `Rates.learn`."""
        self.rates.relax(_DRIFT, math.exp((self._learned_s - now_s) / MODEL_MEMORY_S))
        self._learned_s = now_s
        self.rates.learn(work, busy_s, _ANYTHING, error)
        self.lessons += 1

    def _varied(self, error: float) -> Prior:
        return Prior(self.rates.mean, self.rates.covariance, error, _EACH * error)


def _limited(value: float, most: float) -> float:
    return min(max(value, -most), most)

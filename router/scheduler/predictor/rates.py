"""Time per unit of each kind of work on an engine, learned from the busy time that work caused.

    busy_s ≈ base_s · steps + prefill_s · prompt tokens + context_s · Σ c · (context before + c / 2)
             + decode_s · decoding requests + kv_s · resident tokens        (sums over steps)

The rates are kept as multiples of `NOMINAL_S`, as a normal distribution: recursive least squares
with a prior. Without data they return to the prior, and so do combinations that the data do not
separate: if two kinds of work always occur together, they keep the proportion of the prior.

A few surprising reports in a row (`Noise.ignored`) are outliers, and ignored. One more with a
surprise in the same direction is a change: the earlier knowledge is dropped.

No report changes the predicted time of its work by more than the factor MOST_STEP, or a rate by
more than MOST_RATE_STEP. What the first limit holds back is learned from the next reports.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.loads import LoadCounters
from router.scheduler.predictor._rates_kernel import learn, relative_error, relax

Vector: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[np.float64]

NOMINAL_S: Vector = np.array([1e-2, 5e-5, 1.5e-9, 1e-4, 3e-8])
"""Seconds per step, prompt token, token · context, request and step, token and step: between those
of a small model on one device and those of a large one on eight.
"""


class Prior(Struct, frozen=True, eq=False):
    """The expected rates, in multiples of `NOMINAL_S`, before any observation.

    They differ from `mean`, which has this `covariance`, by a `common` factor, and by one for
    `each` rate: both are standard deviations, relative to the rates.
    """

    mean: Vector
    covariance: Matrix
    common: float
    each: float

    @classmethod
    def around(cls, mean: Vector, common: float, each: float) -> "Prior":
        """Return a prior of rates that differ from these by the two factors only."""
        return cls(mean, np.zeros((len(mean), len(mean))), common, each)


class Noise(Struct, frozen=True):
    """Limits of the engines' deviation from the formula, relative to busy seconds.

    `ignored`: number of surprises in a row, in the same direction, that are taken for outliers.
    """

    least: float
    first: float
    most: float
    ignored: int = 1


def work_of(counters: LoadCounters) -> Vector:
    """Return the counted work, in seconds at the nominal rates."""
    counted = (
        float(counters.steps),
        float(counters.prefill_tokens),
        counters.prefill_token_contexts,
        float(counters.decode_requests),
        float(counters.resident_kv_tokens),
    )
    return np.array(counted) * NOMINAL_S


class Rates:
    """The rates of one engine, or of all engines of a model.

    A normal distribution of multiples of `NOMINAL_S`. Invariants: no rate is 0 or less; the
    covariance is symmetric and no variance is negative.
    """

    __slots__ = ("_noise", "_state", "covariance", "mean")

    def __init__(self, prior: Prior, noise: Noise) -> None:
        self.mean: Vector = np.zeros_like(prior.mean)
        self.covariance: Matrix = np.zeros_like(prior.covariance)
        self._noise = noise
        self._state = np.array([noise.first**2, 0.0])  # {NOISE_VARIANCE, SUSPICION} of the kernel
        self.relax(prior, 0.0)

    @property
    def seconds(self) -> Vector:
        """The rates in seconds per unit, in the order of `NOMINAL_S`."""
        return self.mean * NOMINAL_S

    def relative_error(self, work: Vector) -> float:
        """Return the standard error of the predicted time for work like this, as a fraction."""
        return relative_error(self.mean, self.covariance, work)

    def relax(self, prior: Prior, kept: float) -> None:
        """Move towards the prior; `kept` is the remaining part of the difference, 0 to 1."""
        relax(self.mean, self.covariance, *_fields(prior), kept)

    def learn(self, work: Vector, busy_s: float, anything: Prior, error: float = 0.0) -> bool:
        """Learn from work and its busy time, which has a relative `error`.

        No rate changes by more than the factor MOST_RATE_STEP. `anything`: the rates to expect
        after a change. Returns whether this is a change.
        """
        return learn(
            self.mean,
            self.covariance,
            self._state,
            work,
            busy_s,
            *_fields(anything),
            self._noise.least,
            self._noise.most,
            self._noise.ignored,
            error,
        )

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring."""
        assert (self.mean > 0).all()
        assert np.allclose(self.covariance, self.covariance.T)
        assert (np.diagonal(self.covariance) >= 0).all()


def _fields(prior: Prior) -> tuple[Vector, Matrix, float, float]:
    return prior.mean, prior.covariance, prior.common, prior.each

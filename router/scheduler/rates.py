"""How long a unit of each kind of work takes on an engine, learned from how busy work made it.

    busy_s ≈ base_s · steps + prefill_s · prompt tokens + context_s · Σ c · (context before + c / 2)
             + decode_s · decoding requests + kv_s · resident tokens        (sums over steps)

The rates are kept as multiples of `NOMINAL_S`, as a normal distribution: recursive least squares
with a prior. Without data they go back to the prior, and so does all that the data do not tell
apart: if two kinds of work always come together, they keep the proportion of the prior.

One surprising report is an outlier and counts for nothing. A second one that surprises the same way
is a change: what was known is forgotten.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.loads import LoadCounters
from router.scheduler._rates_kernel import learn, relative_error, relax

Vector: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[np.float64]

NOMINAL_S: Vector = np.array([1e-2, 5e-5, 1.5e-9, 1e-4, 3e-8])
"""Seconds a step, a prompt token, a token · context, a request and step, a token and step: between
those of a small model on one device and those of a large one on eight.
"""


class Prior(Struct, frozen=True, eq=False):
    """What rates may be, in multiples of `NOMINAL_S`, before anything is known of them.

    They differ from `mean`, which has this `covariance`, by a factor common to all, and each by one
    of its own: both are standard deviations, relative to the rates.
    """

    mean: Vector
    covariance: Matrix
    common: float
    each: float

    @classmethod
    def around(cls, mean: Vector, common: float, each: float) -> "Prior":
        """Rates that differ from these only so."""
        return cls(mean, np.zeros((len(mean), len(mean))), common, each)


class Noise(Struct, frozen=True):
    """Limits of how far engines stray from the formula, relative to busy seconds."""

    least: float
    first: float
    most: float


def work_of(counters: LoadCounters) -> Vector:
    """The work that was counted, in seconds at the nominal rates."""
    counted = (
        float(counters.steps),
        float(counters.prefill_tokens),
        counters.prefill_token_contexts,
        float(counters.decode_requests),
        float(counters.resident_kv_tokens),
    )
    return np.array(counted) * NOMINAL_S


class Rates:
    """The rates of one engine, or of all engines of a model: a normal distribution of multiples of
    `NOMINAL_S`.

    Invariants: no rate is 0 or less; the covariance is symmetric and no variance is negative.
    """

    __slots__ = ("_noise", "_state", "covariance", "mean")

    def __init__(self, prior: Prior, noise: Noise) -> None:
        self.mean: Vector = np.zeros_like(prior.mean)
        self.covariance: Matrix = np.zeros_like(prior.covariance)
        self._noise = noise
        self._state = np.array([noise.first**2, 0.0])  # by the kernel's NOISE_VARIANCE, SUSPICION
        self.relax(prior, 0.0)

    @property
    def seconds(self) -> Vector:
        """Seconds a unit, in the order of `NOMINAL_S`."""
        return self.mean * NOMINAL_S

    def relative_error(self, work: Vector) -> float:
        """Standard error of what is predicted for work like this, as a fraction of it."""
        return relative_error(self.mean, self.covariance, work)

    def relax(self, prior: Prior, kept: float) -> None:
        """Go back towards the prior; `kept` is what is left of the difference, 0 to 1."""
        relax(self.mean, self.covariance, *_fields(prior), kept)

    def learn(self, work: Vector, busy_s: float, anything: Prior) -> None:
        """Work made the engine busy for so long. `anything`: what to begin from after a change."""
        learn(
            self.mean,
            self.covariance,
            self._state,
            work,
            busy_s,
            *_fields(anything),
            self._noise.least,
            self._noise.most,
        )

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring."""
        assert (self.mean > 0).all()
        assert np.allclose(self.covariance, self.covariance.T)
        assert (np.diagonal(self.covariance) >= 0).all()


def _fields(prior: Prior) -> tuple[Vector, Matrix, float, float]:
    return prior.mean, prior.covariance, prior.common, prior.each

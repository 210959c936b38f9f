"""How long a unit of each kind of work takes on an engine, learned from how busy work made it.

    busy_s ≈ base_s · steps + prefill_s · prompt tokens + context_s · Σ c · (context before + c / 2)
             + decode_s · decoding requests + kv_s · resident tokens        (sums over steps)

The rates are kept as multiples of `NOMINAL_S`, as a normal distribution: recursive least squares
with a prior. Without data they go back to the prior, and so does all that the data do not tell
apart: if two kinds of work always come together, they keep the proportion of the prior.

One surprising report is an outlier and counts for nothing. A second one that surprises the same way
is a change: what was known is forgotten.
"""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.loads import LoadCounters
from router.scheduler._rates_kernel import learn, relax, spread, vary

Vector: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[np.float64]

NOMINAL_S: Vector = np.array([1e-2, 5e-5, 1.5e-9, 1e-4, 3e-8])
"""Seconds a step, a prompt token, a token · context, a request and step, a token and step: between
those of a small model on one device and those of a large one on eight.
"""

SURPRISING = 3.0
"""Standard deviations."""

_LEAST = 1e-4
_RESOLUTION_S = 1e-4
_NOISE_MEMORY = 0.9


class Belief(Struct, frozen=True, eq=False):
    """What is held to be likely, in multiples of `NOMINAL_S`."""

    mean: Vector
    covariance: Matrix

    @classmethod
    def around(cls, mean: Vector, common: float, each: float) -> "Belief":
        """Rates that differ from these; see `varied`."""
        return cls(mean, np.zeros((len(mean), len(mean)))).varied(common, each)

    def varied(self, common: float, each: float) -> "Belief":
        """Rates that differ from these by a factor common to all, and each by one of its own.

        Both are standard deviations, relative to the rates.
        """
        varied = np.empty_like(self.covariance)
        vary(self.mean, self.covariance, common, each, varied)
        return Belief(self.mean, varied)


class Noise(Struct, frozen=True):
    """Limits of how far engines stray from the formula, relative to busy seconds."""

    least: float
    first: float
    most: float


def work_of(counters: LoadCounters) -> Vector:
    """The work that was counted, in seconds at the nominal rates."""
    counted = [
        float(counters.steps),
        float(counters.prefill_tokens),
        counters.prefill_token_contexts,
        float(counters.decode_requests),
        float(counters.resident_kv_tokens),
    ]
    return np.array(counted) * NOMINAL_S


class Rates:
    """The rates of one engine, or of all engines of a model.

    Invariants: no rate is 0 or less; the covariance is symmetric and no variance is negative.
    """

    __slots__ = ("_noise", "_noise_variance", "_suspicion", "belief")

    def __init__(self, prior: Belief, noise: Noise) -> None:
        self.belief = Belief(prior.mean.copy(), prior.covariance.copy())
        self._noise = noise
        self._noise_variance = noise.first**2
        self._suspicion = 0.0

    @property
    def seconds(self) -> Vector:
        """Seconds a unit, in the order of `NOMINAL_S`."""
        return self.belief.mean * NOMINAL_S

    def relative_error(self, work: Vector) -> float:
        """Standard error of what is predicted for work like this, as a fraction of it."""
        predicted = float(self.belief.mean @ work)
        return math.sqrt(spread(self.belief.covariance, work)) / predicted if predicted else 0.0

    def relax(self, prior: Belief, kept: float) -> None:
        """Go back towards the prior; `kept` is what is left of the difference, 0 to 1."""
        own = self.belief
        relax(own.mean, own.covariance, prior.mean, prior.covariance, kept)

    def learn(self, work: Vector, busy_s: float, prior: Belief) -> None:
        """Work made the engine busy for so long. `prior` is what to begin from after a change."""
        own = self.belief
        predicted_s = float(own.mean @ work)
        surprise_s = busy_s - predicted_s
        scale_s = max(min(busy_s, predicted_s), _RESOLUTION_S)
        noise = self._noise_variance * scale_s**2
        known = spread(own.covariance, work)
        is_surprising = surprise_s**2 > SURPRISING**2 * (known + noise)
        self._note_noise(surprise_s / scale_s, known / scale_s**2)
        if is_surprising and not self._is_second(surprise_s):
            return
        if is_surprising:
            own.covariance[:] += prior.covariance
            known = spread(own.covariance, work)
        self._suspicion = 0.0
        learn(own.mean, own.covariance, work, surprise_s, known + noise, _LEAST)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring."""
        own = self.belief
        assert (own.mean > 0).all()
        assert np.allclose(own.covariance, own.covariance.T)
        assert (np.diagonal(own.covariance) >= 0).all()

    def _is_second(self, surprise_s: float) -> bool:
        """Did the last report surprise in the same direction?"""
        before, self._suspicion = self._suspicion, math.copysign(1.0, surprise_s)
        return self._suspicion == before

    def _note_noise(self, surprise: float, known: float) -> None:
        """What the uncertainty of the rates does not explain is noise; both relative."""
        noise = self._noise_variance
        unexplained = min(max(surprise**2 - known, 0.0), SURPRISING**2 * noise)
        gain = (1 - _NOISE_MEMORY) * noise / (noise + known)
        mixed = noise + gain * (unexplained - noise)
        self._noise_variance = min(max(mixed, self._noise.least**2), self._noise.most**2)

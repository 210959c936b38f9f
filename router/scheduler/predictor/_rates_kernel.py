"""The arithmetic of `rates.py`: a Kalman filter of a few rates."""

import math

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

SURPRISING = 3.0
"""Threshold of a surprise, in standard deviations."""

NOISE_VARIANCE = 0  # deviation of engines from the formula, relative to busy seconds
SUSPICION = 1  # number of the last surprises that were ignored, with their sign; else 0

MOST_STEP = 4.0
"""Factor by which one report changes the predicted time of its own work at most."""

MOST_RATE_STEP = 16.0
"""Factor by which one report changes any rate at most."""

_LEAST = 1e-4
_RESOLUTION_S = 1e-4
_NOISE_MEMORY = 0.9


@device
def varied(mean: Vector, covariance: Matrix, common: float, each: float, i: int, j: int) -> float:
    """Return a covariance of rates that vary by a common factor, and each by its own factor."""
    factor = common * common + (each * each if i == j else 0.0)
    value: float = covariance[i, j] + factor * mean[i] * mean[j]
    return value


@device
def product(one: Vector, other: Vector) -> float:
    """Return Σ one · other."""
    total = 0.0
    for i in range(len(one)):
        total += one[i] * other[i]
    return total


@device
def spread(covariance: Matrix, work: Vector) -> float:
    """Return the variance of the predicted time for this work."""
    variance = 0.0
    for i in range(len(work)):
        for j in range(len(work)):
            variance += work[i] * covariance[i, j] * work[j]
    return max(variance, 0.0)


@kernel("f8(f8[::1], f8[:, ::1], f8[::1])")
def relative_error(mean: Vector, covariance: Matrix, work: Vector) -> float:
    """Return the standard error of the predicted time for this work, as a fraction of it."""
    predicted = product(mean, work)
    return math.sqrt(spread(covariance, work)) / predicted if predicted else 0.0


@kernel("void(f8[::1], f8[:, ::1], f8[::1], f8[:, ::1], f8, f8, f8)")
def relax(
    mean: Vector,
    covariance: Matrix,
    prior_mean: Vector,
    prior_covariance: Matrix,
    common: float,
    each: float,
    kept: float,
) -> None:
    """Move towards the varied prior; `kept` is the remaining part of the difference, 0 to 1."""
    for i in range(len(mean)):
        mean[i] = prior_mean[i] + kept * (mean[i] - prior_mean[i])
        for j in range(len(mean)):
            prior = varied(prior_mean, prior_covariance, common, each, i, j)
            covariance[i, j] = prior + kept * kept * (covariance[i, j] - prior)


@kernel("f8(f8[::1], f8[::1], f8, f8[::1], f8[::1], f8[:, ::1], f8, f8)")
def slowness(
    usual: Vector,
    work: Vector,
    kept: float,
    model_mean: Vector,
    mean: Vector,
    covariance: Matrix,
    excused: float,
    most_spread: float,
) -> float:
    """Return an engine's time for its usual work, relative to its model's; near 1 if uncertain.

    Mixes `work` into `usual` first: `kept` of the earlier value, and the rest of `work`.
    """
    for i in range(len(usual)):
        usual[i] = kept * usual[i] + (1.0 - kept) * work[i]
    taken_s = product(mean, usual)
    error = math.sqrt(spread(covariance, usual)) / taken_s
    known = excused * most_spread**2 / (most_spread**2 + error**2)
    return math.pow(taken_s / product(model_mean, usual), known)


@device
def _raise(mean: Vector, covariance: Matrix) -> None:
    """Raise each rate to the minimum, and the others with it according to their correlation."""
    for i in range(len(mean)):
        missing = _LEAST - mean[i]
        if missing > 0 and covariance[i, i] > 0:
            for j in range(len(mean)):
                mean[j] += covariance[i, j] / covariance[i, i] * missing
    for i in range(len(mean)):
        mean[i] = max(mean[i], _LEAST)


@device
def _explain(
    mean: Vector, covariance: Matrix, work: Vector, surprise_s: float, variance: float
) -> None:
    """Attribute a surprise of this variance, rates and noise together, to the rates.

    Rates are corrected jointly, according to their covariance. Variances that rounding made
    negative are set to 0.
    """
    shared = np.zeros(len(work))
    for i in range(len(work)):
        for j in range(len(work)):
            shared[i] += covariance[i, j] * work[j]
    for i in range(len(work)):
        mean[i] += shared[i] / variance * surprise_s
        for j in range(len(work)):
            covariance[i, j] -= shared[i] * shared[j] / variance
    for i in range(len(work)):
        if covariance[i, i] < 0:
            for j in range(len(work)):
                covariance[i, j] = 0.0
                covariance[j, i] = 0.0
    _raise(mean, covariance)


@device
def _limit(before: Vector, mean: Vector) -> None:
    """Limit the change of each rate to the factor MOST_RATE_STEP."""
    for i in range(len(mean)):
        mean[i] = max(mean[i], before[i] / MOST_RATE_STEP)
        mean[i] = min(mean[i], before[i] * MOST_RATE_STEP)


@device
def _widen(
    mean: Vector, covariance: Matrix, added_mean: Vector, added: Matrix, common: float, each: float
) -> None:
    """Add the uncertainty of the varied prior."""
    for i in range(len(mean)):
        for j in range(len(mean)):
            covariance[i, j] += varied(added_mean, added, common, each, i, j)


@device
def _note_noise(state: Vector, surprise: float, known: float, least: float, most: float) -> None:
    """Update the noise by the part of a surprise not explained by the rates; all relative."""
    noise = state[NOISE_VARIANCE]
    unexplained = min(max(surprise**2 - known, 0.0), SURPRISING**2 * noise)
    gain = (1.0 - _NOISE_MEMORY) * noise / (noise + known)
    mixed = noise + gain * (unexplained - noise)
    state[NOISE_VARIANCE] = min(max(mixed, least**2), most**2)


@kernel(
    "boolean(f8[::1], f8[:, ::1], f8[::1], f8[::1], f8, f8[::1], f8[:, ::1], f8, f8, f8, f8, f8,"
    " f8)"
)
def learn(
    mean: Vector,
    covariance: Matrix,
    state: Vector,
    work: Vector,
    busy_s: float,
    anything_mean: Vector,
    anything_covariance: Matrix,
    common: float,
    each: float,
    least_noise: float,
    most_noise: float,
    ignored: float,
    error: float,
) -> bool:
    """Learn from work that kept an engine busy for `busy_s`; see `Rates.learn`."""
    predicted_s = product(mean, work)
    surprise_s = busy_s - predicted_s
    scale_s = max(min(busy_s, predicted_s), _RESOLUTION_S)
    measured = (error * scale_s) ** 2
    noise = state[NOISE_VARIANCE] * scale_s**2 + measured
    known = spread(covariance, work)
    is_surprising: bool = surprise_s**2 > SURPRISING**2 * (known + noise)
    explained = (known + measured) / scale_s**2
    _note_noise(state, surprise_s / scale_s, explained, least_noise, most_noise)
    if is_surprising:
        before, sign = state[SUSPICION], math.copysign(1.0, surprise_s)
        state[SUSPICION] = before + sign if before * sign > 0 else sign
        if abs(state[SUSPICION]) <= ignored:
            return False
        _widen(mean, covariance, anything_mean, anything_covariance, common, each)
        known = spread(covariance, work)
    rates, uncertainty = mean.copy(), covariance.copy()
    believed_s = min(max(busy_s, predicted_s / MOST_STEP), predicted_s * MOST_STEP)
    _explain(mean, covariance, work, believed_s - predicted_s, known + noise)
    _limit(rates, mean)
    if believed_s != busy_s:
        covariance[:] = uncertainty  # as much is left to learn, and the next report is believed
    else:
        state[SUSPICION] = 0.0
    return is_surprising

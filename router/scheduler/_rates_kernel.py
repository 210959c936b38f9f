"""The arithmetic of `rates.py`: a Kalman filter of a few rates."""

import numpy as np
import numpy.typing as npt

from router.compiled import device, kernel

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]


@kernel("void(f8[::1], f8[:, ::1], f8[::1], f8[:, ::1], f8)")
def relax(
    mean: Vector, covariance: Matrix, prior_mean: Vector, prior_covariance: Matrix, kept: float
) -> None:
    """Go back towards the prior; `kept` is what is left of the difference, 0 to 1."""
    for i in range(len(mean)):
        mean[i] = prior_mean[i] + kept * (mean[i] - prior_mean[i])
        for j in range(len(mean)):
            prior = prior_covariance[i, j]
            covariance[i, j] = prior + kept * kept * (covariance[i, j] - prior)


@kernel("void(f8[::1], f8[:, ::1], f8, f8, f8[:, ::1])")
def vary(mean: Vector, covariance: Matrix, common: float, each: float, varied: Matrix) -> None:
    """Covariance of rates that differ from these by a common factor, and each by one of its own."""
    for i in range(len(mean)):
        for j in range(len(mean)):
            factor = common * common + (each * each if i == j else 0.0)
            varied[i, j] = covariance[i, j] + factor * mean[i] * mean[j]


@kernel("f8(f8[:, ::1], f8[::1])")
def spread(covariance: Matrix, work: Vector) -> float:
    """Variance of what is predicted for this work."""
    variance = 0.0
    for i in range(len(work)):
        for j in range(len(work)):
            variance += work[i] * covariance[i, j] * work[j]
    return max(variance, 0.0)


@device
def _raise(mean: Vector, covariance: Matrix, least: float) -> None:
    """Raise each rate to the least it can be, and the others with it as they are correlated."""
    for i in range(len(mean)):
        missing = least - mean[i]
        if missing > 0 and covariance[i, i] > 0:
            for j in range(len(mean)):
                mean[j] += covariance[i, j] / covariance[i, i] * missing
    for i in range(len(mean)):
        mean[i] = max(mean[i], least)


@kernel("void(f8[::1], f8[:, ::1], f8[::1], f8, f8, f8)")
def learn(
    mean: Vector, covariance: Matrix, work: Vector, surprise: float, variance: float, least: float
) -> None:
    """Explain a surprise of this variance, rates and noise together, by rates of at least `least`.

    What is learned of one rate moves the others by how they are correlated.
    """
    shared = np.zeros(len(work))
    for i in range(len(work)):
        for j in range(len(work)):
            shared[i] += covariance[i, j] * work[j]
    for i in range(len(work)):
        mean[i] += shared[i] / variance * surprise
        for j in range(len(work)):
            covariance[i, j] -= shared[i] * shared[j] / variance
    _raise(mean, covariance, least)

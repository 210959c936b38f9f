"""The mix of `digest.py`, for kernels that follow a set block by block."""

import numpy as np

from router.compiled import device


@device
def mix(word: np.uint64) -> np.uint64:
    """The finaliser of splitmix64; the XOR of it over a set is the set's digest."""
    mixed = word + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

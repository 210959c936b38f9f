"""A digest of a set of blocks, updated in O(1) per change; also a device function.

A digest of a set of blocks, updated in O(1) per change.

The digest is the XOR of the mixed hashes of the members: it does not depend on order, adding and
removing are the same step, and two different sets have equal digests with probability 2^-64. The
mix (the finaliser of splitmix64, Steele et al. 2014) prevents chosen or regular hashes from
cancelling out.
"""

import numpy as np

from router.protocol.values import HashArray
from router.runtime.kernels.numba_runtime import device


@device
def mix(word: np.uint64) -> np.uint64:
    """Return splitmix64's finaliser of `word`.

    The XOR of the mixed hashes of a set is the digest of the set.
    """
    mixed = word + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def digest(hashes: HashArray) -> int:
    """Return the XOR of the mixed hashes; 0 for none.

    The digest of a changed set is the old digest XOR the digest of the added and removed members.
    """
    mixed = hashes.astype(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return int(np.bitwise_xor.reduce(mixed, initial=np.uint64(0)))

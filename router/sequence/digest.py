"""A digest of a set of blocks that follows each change in O(1).

The digest is the XOR of a mix of the members' hashes: it does not depend on order, adding and
removing are the same step, and two sets that differ have equal digests with probability 2^-64. The
mix (the finaliser of splitmix64, Steele et al. 2014) keeps chosen or regular hashes from cancelling
out.
"""

import numpy as np

from router.protocol.values import HashArray

_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def digest(hashes: HashArray) -> int:
    """XOR of the mixed hashes; 0 for none. A set's digest changes by the digest of what changed."""
    mixed = hashes.astype(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return int(np.bitwise_xor.reduce(mixed, initial=np.uint64(0)))

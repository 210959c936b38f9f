"""Kernels that compute the block hashes of a prompt, for `block_hashes.py`."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels._xxh3 import LANES, LARGE, derived_secret, hash_at, hash_long, hash_two
from router.runtime.kernels.numba_runtime import device, kernel

_4 = np.uint64(4)
_16 = np.uint64(16)
_CHAIN_SEED = np.uint64(1337)


@device
def hash_windows(
    base: np.uint64,
    stride: np.uint64,
    length: np.uint64,
    seed: np.uint64,
    out: npt.NDArray[np.uint64],
) -> None:
    """Write XXH3-64 of `length` bytes of memory at every stride; `len(out)` hashes."""
    if length <= LARGE:
        for block in range(np.uint64(len(out))):
            out[block] = hash_at(base + block * stride, length, seed)
        return
    secret, lanes = derived_secret(seed), np.empty(LANES, np.uint64)
    for block in range(np.uint64(len(out))):
        out[block] = hash_long(base + block * stride, length, secret, lanes)


@device
def chained(parent: np.uint64, local_hash: np.uint64) -> np.uint64:
    """Return the sequence hash of a block after its parent."""
    return hash_two(parent, local_hash, _16, _CHAIN_SEED)


@kernel(
    "void(Array(uint32, 1, 'C', readonly=True, aligned=False), int64, int64, uint64,"
    " Array(uint64, 1, 'C'))"
)
def block_hashes(
    tokens: npt.NDArray[np.uint32],
    block_size: int,
    window: int,
    seed: int,
    out: npt.NDArray[np.uint64],
) -> None:
    """Write XXH3-64 of the `window` tokens from the start of each block; `len(out)` hashes.

    The last window must end within the tokens.
    """
    base, stride = np.uint64(tokens.ctypes.data), _4 * np.uint64(block_size)
    hash_windows(base, stride, _4 * np.uint64(window), np.uint64(seed), out)


@device
def _chain(local_hashes: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]) -> None:
    parent = np.uint64(0)
    for block in range(len(out)):
        local_hash = local_hashes[block]
        parent = chained(parent, local_hash) if block else local_hash
        out[block] = parent


@kernel("void(Array(uint64, 1, 'C', readonly=True), Array(uint64, 1, 'C'))")
def chain_hashes(local_hashes: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]) -> None:
    """Write the XXH3-64 chain of parent and local hash; the first is the local hash itself."""
    _chain(local_hashes, out)


@kernel(
    "void(Array(uint32, 1, 'C', readonly=True, aligned=False), int64, int64, uint64,"
    " Array(uint64, 1, 'C'))"
)
def prompt_hashes(
    tokens: npt.NDArray[np.uint32],
    block_size: int,
    window: int,
    seed: int,
    out: npt.NDArray[np.uint64],
) -> None:
    """Write the `block_hashes` of a prompt, then replace them by their `chain_hashes`."""
    base, stride = np.uint64(tokens.ctypes.data), _4 * np.uint64(block_size)
    hash_windows(base, stride, _4 * np.uint64(window), np.uint64(seed), out)
    _chain(out, out)

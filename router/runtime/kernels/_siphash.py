"""SipHash-2-4 of sequence hashes, as a kernel for `keyed_hashes.py`."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel

_V0 = np.uint64(0x736F6D6570736575)
_V1 = np.uint64(0x646F72616E646F6D)
_V2 = np.uint64(0x6C7967656E657261)
_V3 = np.uint64(0x7465646279746573)
_LENGTH = np.uint64(8 << 56)
_FINAL = np.uint64(0xFF)
_64 = np.uint64(64)


@device
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    left = np.uint64(bits)
    return np.uint64((value << left) | (value >> (_64 - left)))


@device
def _round(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v0 += v1
    v1 = _rotated(v1, 13) ^ v0
    v0 = _rotated(v0, 32)
    v2 += v3
    v3 = _rotated(v3, 16) ^ v2
    v0 += v3
    v3 = _rotated(v3, 21) ^ v0
    v2 += v1
    v1 = _rotated(v1, 17) ^ v2
    v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


@device
def _keyed(low: np.uint64, high: np.uint64, message: np.uint64) -> np.uint64:
    v0, v1, v2, v3 = low ^ _V0, high ^ _V1, low ^ _V2, high ^ _V3
    v3 ^= message
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= message
    v3 ^= _LENGTH
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= _LENGTH
    v2 ^= _FINAL
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@kernel("void(uint64, uint64, Array(uint64, 1, 'C', readonly=True), Array(uint64, 1, 'C'))")
def keyed_names(
    low: int, high: int, hashes: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]
) -> None:
    """Write SipHash-2-4 of each hash, as 8 little-endian bytes, under the key (low, high)."""
    for block in range(len(hashes)):
        out[block] = _keyed(np.uint64(low), np.uint64(high), hashes[block])

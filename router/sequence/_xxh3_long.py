"""XXH3-64 of more than 240 bytes, for kernels to call.

    input    ├─ 64 bytes ─┼─ 64 bytes ─┼─ … ─┼─ 64 bytes ─┼─ … ─┤    ├─ last 64 bytes ─┤
                   │            │                  │                        │
    8 lanes ○ ── added ────── added ── … ─────── added ─ scrambled ─ … ── added ─ merged ─▶ hash
                   ▲            ▲                  ▲
    secret    words 0-7    words 1-8          words 15-22, then from the start again

Source: as of `_xxh3.py`.
"""

import numpy as np

from router.compiled import device
from router.sequence._xxh3 import (
    PRIME64_1,
    PRIME64_2,
    PRIME64_3,
    SECRET,
    Lanes,
    avalanche,
    folded_product,
    u64_at,
)

LANES = 8

_PRIME32_1 = np.uint64(0x9E3779B1)
_PRIME32_2 = np.uint64(0x85EBCA77)
_PRIME32_3 = np.uint64(0xC2B2AE3D)
_PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
_FIRST_LANES = np.array(
    [
        *(_PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3),
        *(_PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1),
    ]
)

_LAST_STRIPE = np.uint64(24)
_MERGE = np.uint64(32)
_SECRET_WORDS = 40

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_8 = np.uint64(8)
_15 = np.uint64(15)
_16 = np.uint64(16)
_24 = np.uint64(24)
_32 = np.uint64(32)
_64 = np.uint64(64)
_LOW_HALF = np.uint64(0xFFFFFFFF)


@device
def derived_secret(seed: np.uint64) -> Lanes:
    """What long inputs are hashed with under a seed.

    The secret's 24 words, and behind them the words off its grid that the last stripe (byte 121)
    and the merge (byte 11) take.
    """
    secret = np.empty(_SECRET_WORDS, np.uint64)
    for i in range(_0, _24, _2):
        secret[i] = SECRET[i] + seed
        secret[i + _1] = SECRET[i + _1] - seed
    for i in range(_8):
        secret[_LAST_STRIPE + i] = _across(secret[_15 + i], secret[_16 + i], _8)
        secret[_MERGE + i] = _across(secret[_1 + i], secret[_2 + i], _24)
    return secret


@device
def hash_long(address: np.uint64, length: np.uint64, secret: Lanes, lanes: Lanes) -> np.uint64:
    """XXH3-64 of more than LARGE bytes, under a derived secret; `lanes`: LANES u64 to work in."""
    lanes[:] = _FIRST_LANES
    stripes = (length - _1) // _64
    for stripe in range(stripes):
        _add(lanes, address + _64 * stripe, secret, stripe % _16)
        if stripe % _16 == _15:
            _scramble(lanes, secret)
    _add(lanes, address + length - _64, secret, _LAST_STRIPE)
    return avalanche(length * PRIME64_1 + _merged(lanes, secret))


@device
def _add(lanes: Lanes, place: np.uint64, secret: Lanes, key: np.uint64) -> None:
    for i in range(_0, _8, _2):
        left, right = u64_at(place + _8 * i), u64_at(place + _8 * i + _8)
        lanes[i] += right + _product_of_halves(left ^ secret[key + i])
        lanes[i + _1] += left + _product_of_halves(right ^ secret[key + i + _1])


@device
def _scramble(lanes: Lanes, secret: Lanes) -> None:
    for i in range(_8):
        lane = lanes[i] ^ (lanes[i] >> np.uint64(47)) ^ secret[_16 + i]
        lanes[i] = lane * _PRIME32_1


@device
def _merged(lanes: Lanes, secret: Lanes) -> np.uint64:
    result = _0
    for i in range(_0, _8, _2):
        left, right = lanes[i] ^ secret[_MERGE + i], lanes[i + _1] ^ secret[_MERGE + i + _1]
        result += folded_product(left, right)
    return result


@device
def _product_of_halves(value: np.uint64) -> np.uint64:
    return (value & _LOW_HALF) * (value >> _32)


@device
def _across(word: np.uint64, after: np.uint64, bits: np.uint64) -> np.uint64:
    return (word >> bits) | (after << (_64 - bits))

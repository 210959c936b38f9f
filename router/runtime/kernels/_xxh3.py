"""XXH3-64 with a seed, as device functions on memory addresses.

    0-16 bytes     17-128            129-240           > 240 (`_xxh3.py`)
    one product    one product for every 16 bytes      64 bytes at a time into 8 lanes
                   from both ends    from the start

Source: the XXH3 section of the xxHash specification (Cyan4973/xxHash, `doc/xxhash_spec.md`), which
names every constant, mix and avalanche used here. Lengths are multiples of 4, because tokens are
u32. Numbers are read in native byte order, so the machine must be little-endian.

The functions take addresses, not arrays: Numba may update an array's reference count at each call,
and two updates take as long as the hash of a short block.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, intrinsic, ir, numba

Lanes = npt.NDArray[np.uint64]

SHORT = np.uint64(16)
MEDIUM = np.uint64(128)
LARGE = np.uint64(240)
"""The largest input, in bytes, of each way to hash."""

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SECRET = np.frombuffer(_SECRET_BYTES, np.uint64)
_SECRET_3 = np.frombuffer(_SECRET_BYTES, np.uint64, 14, offset=3)
_SECRET_119 = np.frombuffer(_SECRET_BYTES, np.uint64, 2, offset=119)

PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME64_3 = np.uint64(0x165667B19E3779F9)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)
_PRIME_MX2 = np.uint64(0x9FB21C651E98DF25)

# Numba converts u64 combined with a plain integer to float, so every number here is a u64.
_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_8 = np.uint64(8)
_16 = np.uint64(16)
_32 = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def _reader(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def read(_context: object, _address: object) -> object:
        number = getattr(numba, name)

        def load(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
            pointer = ir.IntType(number.bitwidth).as_pointer()
            return builder.load(builder.inttoptr(arguments[0], pointer), align=1)

        return number(numba.uint64), load

    return read


u8_at = _reader("uint8")
u32_at = _reader("uint32")
u64_at = _reader("uint64")
"""Readers of the number at an address, which need not be aligned."""


@intrinsic  # type: ignore[untyped-decorator]
def folded_product(_context: object, _left: object, _right: object) -> object:
    """Return the XOR of both halves of the 128-bit product. Numba has no 128-bit integers."""

    def fold(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
        left, right = (builder.zext(argument, ir.IntType(128)) for argument in arguments)
        product = builder.mul(left, right)
        high = builder.lshr(product, ir.Constant(ir.IntType(128), 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return numba.uint64(numba.uint64, numba.uint64), fold


@intrinsic  # type: ignore[untyped-decorator]
def _swapped(_context: object, _value: object) -> object:
    """Return a u64 with its bytes reversed."""

    def swap(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
        return builder.bswap(arguments[0])

    return numba.uint64(numba.uint64), swap


@device
def hash_at(address: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    """Return XXH3-64 of up to LARGE bytes of memory. `length` is a multiple of 4."""
    if length <= SHORT:
        return _hash_short(address, length, seed)
    if length <= MEDIUM:
        return _hash_medium(address, length, seed)
    return _hash_large(address, length, seed)


@device
def hash_two(first: np.uint64, last: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    """Return XXH3-64 of 9 to 16 bytes, given as the u64 at their start and the u64 at their end."""
    first ^= (SECRET[3] ^ SECRET[4]) + seed
    last ^= (SECRET[5] ^ SECRET[6]) - seed
    return avalanche(length + _swapped(first) + last + folded_product(first, last))


@device
def _hash_short(address: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    if length == _0:
        return _avalanche64(seed ^ SECRET[7] ^ SECRET[8])
    end = address + length
    if length > _8:
        return hash_two(u64_at(address), u64_at(end - _8), length, seed)
    seed ^= _swapped(seed & _LOW_HALF)
    both = np.uint64(u32_at(end - _4)) + (np.uint64(u32_at(address)) << _32)
    return _rrmxmx(both ^ ((SECRET[1] ^ SECRET[2]) - seed), length)


@device
def _hash_medium(address: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    result = length * PRIME64_1
    end = address + length
    for i in range((length + np.uint64(31)) // _32):
        result += _mix(address + _16 * i, SECRET[_4 * i], SECRET[_4 * i + _1], seed)
        result += _mix(end - _16 * (i + _1), SECRET[_4 * i + _2], SECRET[_4 * i + _3], seed)
    return avalanche(result)


@device
def _hash_large(address: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    result = length * PRIME64_1
    for i in range(_8):
        result += _mix(address + _16 * i, SECRET[_2 * i], SECRET[_2 * i + _1], seed)
    result = avalanche(result)
    for i in range(length // _16 - _8):
        place = address + _16 * (i + _8)
        result += _mix(place, _SECRET_3[_2 * i], _SECRET_3[_2 * i + _1], seed)
    end = address + length
    return avalanche(result + _mix(end - _16, _SECRET_119[0], _SECRET_119[1], seed))


@device
def _mix(place: np.uint64, left: np.uint64, right: np.uint64, seed: np.uint64) -> np.uint64:
    left, right = u64_at(place) ^ (left + seed), u64_at(place + _8) ^ (right - seed)
    mixed: np.uint64 = folded_product(left, right)
    return mixed


@device
def avalanche(value: np.uint64) -> np.uint64:
    """Return the specification's final mix, in which every bit of a value affects every other."""
    value = (value ^ (value >> np.uint64(37))) * _PRIME_MX1
    return value ^ (value >> _32)


@device
def _avalanche64(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(33))) * PRIME64_2
    value = (value ^ (value >> np.uint64(29))) * PRIME64_3
    return value ^ (value >> _32)


@device
def _rrmxmx(value: np.uint64, length: np.uint64) -> np.uint64:
    value ^= _rotated(value, np.uint64(49)) ^ _rotated(value, np.uint64(24))
    value *= _PRIME_MX2
    value = (value ^ ((value >> np.uint64(35)) + length)) * _PRIME_MX2
    return value ^ (value >> np.uint64(28))


@device
def _rotated(value: np.uint64, bits: np.uint64) -> np.uint64:
    return (value << bits) | (value >> (np.uint64(64) - bits))


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

_15 = np.uint64(15)
_24 = np.uint64(24)
_64 = np.uint64(64)


@device
def derived_secret(seed: np.uint64) -> Lanes:
    """Return the secret of long inputs under a seed.

    It holds the secret's 24 words, then the words at unaligned offsets which the last stripe (byte
    121) and the merge (byte 11) use.
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
    """Return XXH3-64 of more than LARGE bytes.

    `secret`: see `derived_secret`; `lanes`: scratch space of LANES u64.
    """
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

"""A kernel that finds and parses the token array of a JSON object, without an object per token.

    {"model_name": "m", "token_ids": [15, 8, 1024], …}
                                     └─ span ─────┘   ──▶  u32 buffer

Consecutive numbers, separated by a comma or a comma and a space, are read 64 bytes at a time
(`_read_run`): the ends of all numbers are one word of bits, so that parsing a number does not wait
for the number before it. This takes a third of the time, and less if the 64 bytes are nothing but
digits and single commas. Everything else is read byte by byte.

The kernel parses less than JSON: outside the array it only finds where values end, and the caller
decodes the rest strictly. Input that it does not recognise with certainty is NOT_PLAIN, valid or
not: escapes in the object's keys, a repeated key, a value that is not an array, a number that is
not a plain u32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from router.runtime.kernels._xxh3 import u64_at
from router.runtime.kernels.numba_runtime import (
    device,
    intrinsic,
    ir,
    kernel,
    numba,
    trailing_zeros,
)

Bytes = npt.NDArray[np.uint8]

NOT_PLAIN = -1
NO_TOKENS = -2
NO_SHAPE = 0

_SPACE, _TAB, _NEWLINE, _RETURN = 0x20, 0x09, 0x0A, 0x0D
_QUOTE, _BACKSLASH, _COMMA, _COLON = 0x22, 0x5C, 0x2C, 0x3A
_OPEN, _CLOSE, _OPEN_ARRAY, _CLOSE_ARRAY = 0x7B, 0x7D, 0x5B, 0x5D
_ZERO = 0x30

_KEY = np.frombuffer(b"token_ids", np.uint8)

_WORD_BYTES, _CHUNK_BYTES = 8, 64
_1, _3, _8, _16 = np.uint64(1), np.uint64(3), np.uint64(8), np.uint64(16)
_32, _56, _63, _64 = np.uint64(32), np.uint64(56), np.uint64(63), np.uint64(64)
_ZEROS = np.uint64(0x3030303030303030)
_TO_HIGH_BIT = np.uint64(0x7676767676767676)  # sets the high bit of each byte above 9
_HIGH_BITS = np.uint64(0x8080808080808080)
_TEN = np.uint64(10)
_PAIRS = np.uint64(0x000000FF000000FF)
_UPPER = np.uint64(0x000F424000000064)  # 1,000,000 and 100
_LOWER = np.uint64(0x0000271000000001)  # 10,000 and 1
_U32_MAX = np.uint64(0xFFFFFFFF)
_SHAPE_SEED, _SHAPE_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a


def _mask_of(first: int, count: int) -> Callable[[Any, Any], object]:
    """Return an intrinsic: a bit mask of these byte values among the 64 bytes at an address.

    The first byte is the lowest bit.
    """

    def mask_at(_context: object, _address: object) -> object:
        def compare(_context: object, builder: Any, _signature: object, arguments: Any) -> object:
            chunk = ir.VectorType(ir.IntType(8), _CHUNK_BYTES)
            place = builder.inttoptr(arguments[0], chunk.as_pointer())
            loaded = builder.load(place)
            loaded.align = 1
            above = builder.sub(loaded, ir.Constant(chunk, [first] * _CHUNK_BYTES))
            below = ir.Constant(chunk, [count] * _CHUNK_BYTES)
            return builder.bitcast(builder.icmp_unsigned("<", above, below), ir.IntType(64))

        return numba.uint64(numba.uint64), compare

    return mask_at


_digits_at = intrinsic(_mask_of(_ZERO, 10))
_commas_at = intrinsic(_mask_of(_COMMA, 1))


@device
def _byte(body: Bytes, at: int | np.uint64) -> int:
    """Return a byte. Casts `at` to unsigned, so that no negative index is checked for."""
    byte: int = body[np.uint64(at)]
    return byte


@device
def _is_space(byte: int) -> bool:
    return byte <= _SPACE and byte in (_SPACE, _NEWLINE, _RETURN, _TAB)


@device
def _is_digit(byte: int) -> bool:
    return _ZERO <= byte <= _ZERO + 9


@device
def _after_space(body: Bytes, at: int) -> int:
    while at < len(body) and _is_space(_byte(body, at)):
        at += 1
    return at


@device
def _after_string(body: Bytes, at: int) -> int:
    """Return the end of the string with its first quote at `at`.

    Returns the end of the body if the string is not closed.
    """
    at += 1
    while at < len(body):
        if _byte(body, at) == _BACKSLASH:
            at += 1
        elif _byte(body, at) == _QUOTE:
            return at + 1
        at += 1
    return len(body)


@device
def _after_value(body: Bytes, at: int) -> int:
    """Return the end of the value that begins at `at`: a comma or bracket of the outer object."""
    depth = 0
    while at < len(body):
        byte = _byte(body, at)
        if byte == _QUOTE:
            at = _after_string(body, at)
            continue
        if byte in (_OPEN, _OPEN_ARRAY):
            depth += 1
        elif byte in (_CLOSE, _CLOSE_ARRAY):
            if depth == 0:
                return at
            depth -= 1
        elif byte == _COMMA and depth == 0:
            return at
        at += 1
    return at


@device
def _is_key(body: Bytes, start: int, end: int) -> bool:
    same = 0
    while same < min(len(_KEY), end - start) and _byte(body, start + same) == _KEY[same]:
        same += 1
    return same == len(_KEY) == end - start


@device
def _has_backslash(body: Bytes, start: int, end: int) -> bool:
    while start < end and _byte(body, start) != _BACKSLASH:
        start += 1
    return start < end


@device
def _value_of(body: Bytes, key_end: int) -> int:
    """Return the start of the value after the key that ends here; without one, the body's end."""
    at = _after_space(body, key_end)
    if at >= len(body) or _byte(body, at) != _COLON:
        return len(body)
    return _after_space(body, at + 1)


@device
def _number(body: Bytes, base: np.uint64, at: int) -> tuple[np.uint64, int]:
    """Parse the digits at `at` as a u32; return the number and its end.

    The end is `at` itself if the digits are no valid u32 literal. Digits are read 8 at a time, with
    one subtraction and three products.
    """
    if at + _WORD_BYTES <= len(body):
        word = u64_at(base + np.uint64(at)) ^ _ZEROS
        others = _others(word)
        if others:
            bits = trailing_zeros(others) & ~np.uint64(7)
            if bits == np.uint64(0) or (bits > _8 and _byte(body, at) == _ZERO):
                return np.uint64(0), at
            return _parsed(word << (_64 - bits)), at + int(bits >> _3)
    value, end = np.uint64(0), at
    while end < len(body) and _is_digit(_byte(body, end)):
        value = value * _TEN + np.uint64(_byte(body, end) - _ZERO)
        if value > _U32_MAX:
            return np.uint64(0), at
        end += 1
    if end - at > 1 and _byte(body, at) == _ZERO:
        return np.uint64(0), at
    return value, end


@device
def _others(word: np.uint64) -> np.uint64:
    """Return a word with high bits that mark bytes above 9; the lowest mark is exact."""
    return ((word + _TO_HIGH_BIT) | word) & _HIGH_BITS


@device
def _parsed(word: np.uint64) -> np.uint64:
    """Return the number of eight digits with values 0 to 9, the first digit in the lowest byte."""
    word = word * _TEN + (word >> _8)
    return ((word & _PAIRS) * _UPPER + ((word >> _16) & _PAIRS) * _LOWER) >> _32


@device
def _read_run(
    body: Bytes, base: np.uint64, start: int, tokens: npt.NDArray[np.uint32]
) -> tuple[int, int]:
    """Parse consecutive plain numbers, each with its comma; return their count and end.

    `start` is at least eight bytes into the body.
    """
    count, number = np.uint64(0), np.uint64(start)
    chunk, last, was_plain = np.uint64(start), np.uint64(0), False
    while chunk + np.uint64(_CHUNK_BYTES) < len(body):
        digits = _digits_at(base + chunk)
        ends = ~digits & ((digits << _1) | last)
        is_plain = ends == ~digits and ends == _commas_at(base + chunk)
        is_checked = is_plain and (was_plain or number == chunk)
        while ends:
            end = chunk + trailing_zeros(ends)
            ends &= ends - _1
            bits = (end - number) << _3
            if bits - _8 > _56 or (bits > _8 and _byte(body, number) == _ZERO):
                return int(count), int(number)
            word = (u64_at(base + end - _8) ^ _ZEROS) >> (_64 - bits) << (_64 - bits)
            if not is_checked and (_byte(body, end) != _COMMA or _others(word)):
                return int(count), int(number)
            tokens[count] = np.uint32(_parsed(word))
            count += _1
            number = end + _1
            if not is_checked and body[number] == _SPACE:
                number += _1
        was_plain = is_plain
        last = digits >> _63
        chunk += _64
    return int(count), int(number)


@device
def _read_array(
    body: Bytes, base: np.uint64, at: int, tokens: npt.NDArray[np.uint32]
) -> tuple[int, int]:
    """Parse the array that begins here; return its token count, or NOT_PLAIN, and its end."""
    if at >= len(body) or _byte(body, at) != _OPEN_ARRAY:
        return NOT_PLAIN, at
    at = _after_space(body, at + 1)
    if at < len(body) and _byte(body, at) == _CLOSE_ARRAY:
        return 0, at + 1
    count, at = _read_run(body, base, at, tokens)
    at = _after_space(body, at)
    while at < len(body):
        value, end = _number(body, base, at)
        if end == at:
            return NOT_PLAIN, at
        tokens[np.uint64(count)] = np.uint32(value)
        count += 1
        at = _after_space(body, end)
        if at >= len(body) or _byte(body, at) != _COMMA:
            break
        at = _after_space(body, at + 1)
    if at < len(body) and _byte(body, at) == _CLOSE_ARRAY:
        return count, at + 1
    return NOT_PLAIN, at


@device
def _shape(body: Bytes, start: int, end: int) -> int:
    """Return a hash of the names and brackets of a body, without those from `start` to `end`.

    Returns NO_SHAPE if a name contains an escape. A string is a name if a colon follows.
    """
    at, shape = 0, _SHAPE_SEED
    while at < len(body):
        byte = _byte(body, at)
        if at == start:
            at = end
        elif byte == _QUOTE:
            after = _after_string(body, at)
            behind = _after_space(body, after)
            if behind < len(body) and _byte(body, behind) == _COLON:
                if _has_backslash(body, at, after):
                    return NO_SHAPE
                while at < after:
                    shape = (shape ^ np.uint64(_byte(body, at))) * _SHAPE_PRIME
                    at += 1
            at = after
        else:
            if byte in (_OPEN, _CLOSE, _OPEN_ARRAY, _CLOSE_ARRAY):
                shape = (shape ^ np.uint64(byte)) * _SHAPE_PRIME
            at += 1
    return int(np.int64(shape | _1))


@kernel("UniTuple(int64, 4)(Array(uint8, 1, 'C', readonly=True), Array(uint32, 1, 'C'))")
def find_tokens(body: Bytes, tokens: npt.NDArray[np.uint32]) -> tuple[int, int, int, int]:
    """Write the numbers of the array `token_ids` of the object in `body`.

    Returns their count, or NO_TOKENS or NOT_PLAIN, and the start and end of the array; then a hash
    of the names and brackets in the rest of the body, or NO_SHAPE. `tokens` needs room for one
    number per two bytes of the body, and one more. O(bytes).
    """
    start = end_of_array = 0
    base = np.uint64(body.ctypes.data)
    at = _after_space(body, 0)
    if at >= len(body) or _byte(body, at) != _OPEN:
        return NOT_PLAIN, 0, 0, NO_SHAPE
    count = NO_TOKENS
    at = _after_space(body, at + 1)
    while at < len(body) and _byte(body, at) == _QUOTE:
        end = _after_string(body, at)
        if _has_backslash(body, at, end):
            return NOT_PLAIN, 0, 0, NO_SHAPE
        is_ours = _is_key(body, at + 1, end - 1)
        at = _value_of(body, end)
        if is_ours:
            if count != NO_TOKENS:
                return NOT_PLAIN, 0, 0, NO_SHAPE
            start = at
            count, at = _read_array(body, base, at, tokens)
            end_of_array = at
            at = _after_space(body, at)
        else:
            at = _after_value(body, at)
        if count == NOT_PLAIN or at >= len(body) or _byte(body, at) != _COMMA:
            break
        at = _after_space(body, at + 1)
    shape = _shape(body, start, end_of_array) if count >= 0 else NO_SHAPE
    return count, start, end_of_array, shape

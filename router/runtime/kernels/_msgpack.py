"""A MessagePack reader for kernels: it parses one head after another, by address, without objects.

`find_packed_tokens` finds the tokens of a request, as `find_tokens` does in JSON.

    head: a code (1 byte) │ a number or a length (0 to 8 bytes, big-endian) ┊ bytes or elements …

Source: the MessagePack specification (msgpack/msgpack, `spec.md`). Nothing is read at or past the
end, and lengths that the remaining bytes cannot fill are rejected. Address 0 stands for none.
"""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels._xxh3 import u8_at, u32_at
from router.runtime.kernels.numba_runtime import device, kernel

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint32]

NATURAL = np.uint64(0)
NEGATIVE = np.uint64(1)
NIL = np.uint64(2)
OTHER = np.uint64(3)
STRING = np.uint64(4)
BINARY = np.uint64(5)
EXTENSION = np.uint64(6)
LIST = np.uint64(7)
MAP = np.uint64(8)
BROKEN = np.uint64(9)
"""Kinds of values. `NEGATIVE`: an integer, its 64 bits; `OTHER`: a float or truth value, which no
field uses; `BROKEN`: the bytes end too early, or are not valid."""

_FIRST_CODE = np.uint64(0xC0)
_CODES = (
    # kind, bytes of the number or length, bytes of the body beyond the length
    (NIL, 0, 0),
    (BROKEN, 0, 0),
    *((OTHER, 0, 0) for _ in ("false", "true")),
    *((BINARY, width, 0) for width in (1, 2, 4)),
    *((EXTENSION, width, 1) for width in (1, 2, 4)),
    *((OTHER, width, 0) for width in (4, 8)),
    *((NATURAL, width, 0) for width in (1, 2, 4, 8)),
    *((NEGATIVE, width, 0) for width in (1, 2, 4, 8)),
    *((EXTENSION, 0, 1 + size) for size in (1, 2, 4, 8, 16)),
    *((STRING, width, 0) for width in (1, 2, 4)),
    *((LIST, width, 0) for width in (2, 4)),
    *((MAP, width, 0) for width in (2, 4)),
)
_KINDS = np.array([kind for kind, _, _ in _CODES], np.uint64)
_WIDTHS = np.array([width for _, width, _ in _CODES], np.uint64)
_BODIES = np.array([body for _, _, body in _CODES], np.uint64)

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_5 = np.uint64(5)
_8 = np.uint64(8)
_16 = np.uint64(16)
_64 = np.uint64(64)
_U16_CODE = np.uint8(0xCD)
_U32_CODE = np.uint8(0xCE)
_ODD_BYTES = np.uint64(0x00FF00FF)
_U32_MAX = np.uint64(2**32 - 1)


@device
def head_at(at: np.uint64, end: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return the kind of a value, its number or length, and the address after its head."""
    if at >= end:
        return BROKEN, _0, at
    code = np.uint64(u8_at(at))
    at += _1
    if code < np.uint64(0x80):
        return NATURAL, code, at
    if code >= np.uint64(0xE0):
        return NEGATIVE, code | ~np.uint64(0xFF), at
    if code >= _FIRST_CODE:
        return _long_head_at(code - _FIRST_CODE, at, end)
    if code >= np.uint64(0xA0):
        return _that_fits(STRING, code & np.uint64(31), at, end)
    kind = LIST if code >= np.uint64(0x90) else MAP
    return _that_fits(kind, code & np.uint64(15), at, end)


@device
def _long_head_at(
    code: np.uint64, at: np.uint64, end: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    kind, width = _KINDS[code], _WIDTHS[code]
    if width > end - at:
        return BROKEN, _0, at
    value = _0
    for i in range(width):
        value = (value << _8) | np.uint64(u8_at(at + i))
    at += width
    if kind in (NATURAL, OTHER):
        return kind, value, at
    if kind == NEGATIVE:
        return _signed(value, width, at)
    return _that_fits(kind, value + _BODIES[code], at, end)


@device
def _signed(
    value: np.uint64, width: np.uint64, at: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    bits = width * _8
    if not (value >> (bits - _1)) & _1:
        return NATURAL, value, at
    if bits < _64:
        value |= ~_0 << bits
    return NEGATIVE, value, at


@device
def _that_fits(
    kind: np.uint64, length: np.uint64, at: np.uint64, end: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    least_bytes = length + length if kind == MAP else length
    if least_bytes > end - at:
        return BROKEN, _0, at
    return kind, length, at


@device
def skip(at: np.uint64, end: np.uint64) -> np.uint64:
    """Return the end address of a value of any depth, or 0 if it is broken. O(bytes)."""
    pending = _1
    while pending:
        kind, length, at = head_at(at, end)
        if kind == BROKEN:
            return _0
        pending -= _1
        if kind == LIST:
            pending += length
        elif kind == MAP:
            pending += length + length
        elif kind in (STRING, BINARY, EXTENSION):
            at += length
    return at


@device
def _swapped_half(value: np.uint32) -> np.uint64:
    wide = np.uint64(value)
    odd, even = (wide >> _8) & _ODD_BYTES, (wide & _ODD_BYTES) << _8
    halves = odd | even
    return ((halves << _16) | (halves >> _16)) & _U32_MAX


@device
def read_u32s(
    at: np.uint64, count: np.uint64, end: np.uint64, out: Halves, first: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Copy integers into `out`, up to the first one that is not a u32.

    Returns the number of integers copied and the address after them. Most tokens take two or
    four bytes.
    """
    i = _0
    while i < count:
        if at + _8 <= end and u8_at(at) == _U32_CODE:
            value, after = _swapped_half(u32_at(at + _1)), at + _5
        elif at + _8 <= end and u8_at(at) == _U16_CODE:
            value = (np.uint64(u8_at(at + _1)) << _8) | np.uint64(u8_at(at + _2))
            after = at + _3
        else:
            kind, value, after = head_at(at, end)
            if kind != NATURAL or value > _U32_MAX:
                break
        out[first + i] = np.uint32(value)
        at = after
        i += _1
    return i, at


@device
def same_bytes(one: np.uint64, other: np.uint64, length: np.uint64) -> bool:
    """Return whether two ranges of memory contain equal bytes."""
    i = _0
    while i < length and u8_at(one + i) == u8_at(other + i):
        i += _1
    return bool(i == length)


NOT_PLAIN = -1
NO_TOKENS = -2
NO_SHAPE = 0

_KEY = np.frombuffer(b"token_ids", np.uint8)
_SHAPE_SEED, _SHAPE_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a


@device
def _is_key(at: np.uint64, length: np.uint64) -> bool:
    same = _0
    while same < min(length, np.uint64(len(_KEY))) and u8_at(at + same) == _KEY[same]:
        same += _1
    return bool(same == length == np.uint64(len(_KEY)))


@device
def _hashed(shape: np.uint64, at: np.uint64, end: np.uint64) -> np.uint64:
    """Return a hash that the bytes of a range are added to."""
    while at < end:
        shape = (shape ^ np.uint64(u8_at(at))) * _SHAPE_PRIME
        at += _1
    return shape


@device
def _flat_end(at: np.uint64, end: np.uint64) -> tuple[bool, np.uint64]:
    """Return whether a value contains no map, and its end, or 0 if it is broken."""
    kind, _, _ = head_at(at, end)
    return kind not in (LIST, MAP), skip(at, end)


@device
def _tokens_at(at: np.uint64, end: np.uint64, tokens: Halves) -> tuple[int, np.uint64]:
    """Copy the tokens of a list; return their count and its end, or 0 as its end."""
    kind, length, first = head_at(at, end)
    if kind != LIST:
        return NOT_PLAIN, _0
    count, after = read_u32s(first, length, end, tokens, _0)
    return int(count), after if count == length else _0


@kernel("UniTuple(int64, 4)(Array(uint8, 1, 'C', readonly=True), Array(uint32, 1, 'C'))")
def find_packed_tokens(body: Bytes, tokens: Halves) -> tuple[int, int, int, int]:
    """Write the numbers of the list `token_ids` of the map in `body`.

    Returns their count, or NO_TOKENS or NOT_PLAIN, and the start and end of the list, which are 0
    without tokens; then a hash of the map's names, or NO_SHAPE if another value may contain a map.
    `tokens` needs room for one number per byte. O(bytes).
    """
    base = np.uint64(body.ctypes.data)
    end = base + np.uint64(len(body))
    count, start, after, shape = NO_TOKENS, base, base, _SHAPE_SEED
    is_flat = True
    kind, fields, at = head_at(base, end)
    if kind != MAP:
        return NOT_PLAIN, 0, 0, NO_SHAPE
    for _ in range(fields):
        kind, length, key = head_at(at, end)
        if kind != STRING:
            return NOT_PLAIN, 0, 0, NO_SHAPE
        shape, at = _hashed(shape, at, key + length), key + length
        if not _is_key(key, length):
            is_other_flat, at = _flat_end(at, end)
            is_flat = is_flat and is_other_flat
        elif count == NO_TOKENS:
            start = at
            count, at = _tokens_at(at, end, tokens)
            after = at
        else:
            at = _0
        if at == _0:
            return NOT_PLAIN, 0, 0, NO_SHAPE
    if at != end:
        return NOT_PLAIN, 0, 0, NO_SHAPE
    known = int(np.int64(shape | _1)) if is_flat else NO_SHAPE
    return count, int(start - base), int(after - base), known

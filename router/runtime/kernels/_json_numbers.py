"""A kernel that writes an array of numbers as JSON, without an object per number.

A number is three groups of eight digits: each group is one word, split into its digits by three
products for all digits at once.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import (
    device,
    intrinsic,
    ir,
    kernel,
    numba,
    trailing_zeros,
)

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

NUMBER_BYTES = 21
"""The most bytes of a number: a sign, 19 digits, and a comma. Space for 20."""

SPARE_BYTES = 8
"""Bytes behind the last number, which may be overwritten."""

_GROUP = np.uint64(100_000_000)
_ASCII_ZEROS = np.uint64(0x3030303030303030)
_SEVEN_BITS = np.uint64(0x0000007F0000007F)
_FOUR_BITS = np.uint64(0x000F000F000F000F)
_0, _1, _3, _7, _8 = np.uint64(0), np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(8)
_10, _16, _20, _32 = np.uint64(10), np.uint64(16), np.uint64(20), np.uint64(32)
_MINUS, _COMMA, _OPEN, _CLOSE = (np.uint8(ord(each)) for each in "-,[]")


@intrinsic  # type: ignore[untyped-decorator]
def _store(_context: object, _address: object, _word: object) -> object:
    """Store a word at an address, aligned or not."""

    def store(context: Any, builder: Any, _signature: object, arguments: Any) -> object:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(arguments[1], place).align = 1
        return context.get_dummy_value()

    return numba.types.none(numba.uint64, numba.uint64), store


@device
def _digits(group: np.uint64) -> np.uint64:
    """Return the eight digits of a number below 10⁸, the first one in the lowest byte."""
    fours = group // np.uint64(10_000) | (group % np.uint64(10_000)) << _32
    upper = (fours * np.uint64(10_486)) >> _20 & _SEVEN_BITS
    twos = (fours - np.uint64(100) * upper) << _16
    twos += upper
    tens = (twos * np.uint64(103)) >> _10 & _FOUR_BITS
    digits: np.uint64 = tens + ((twos - _10 * tens) << _8)
    return digits


@device
def _write_number(number: np.uint64, at: np.uint64) -> np.uint64:
    """Write a number at an address; return its end."""
    groups = (number // (_GROUP * _GROUP), number // _GROUP % _GROUP, number % _GROUP)
    is_begun = False
    for i in range(3):
        digits = _digits(groups[i])
        skipped = _0
        if not is_begun:
            if groups[i] == _0 and i < 2:
                continue
            skipped = min(trailing_zeros(digits) >> _3, _7)
            is_begun = True
        _store(at, (digits + _ASCII_ZEROS) >> (skipped << _3))
        at += _8 - skipped
    return at


@kernel("int64(Array(int64, 1, 'C', readonly=True), Array(uint8, 1, 'C'))")
def write_numbers(numbers: Numbers, text: Bytes) -> int:
    """Write an array as JSON; return its length.

    `text` has NUMBER_BYTES for each number, and SPARE_BYTES and two more.
    """
    base = np.uint64(text.ctypes.data)
    at = base
    text[0] = _OPEN
    at += _1
    for i in range(len(numbers)):
        number = np.uint64(numbers[i])
        if numbers[i] < 0:
            text[at - base] = _MINUS
            at += _1
            number = _0 - number
        at = _write_number(number, at)
        text[at - base] = _COMMA
        at += _1
    if len(numbers):
        at -= _1
    text[at - base] = _CLOSE
    return int(at - base) + 1


def as_json(value: object) -> msgspec.Raw:
    """Return an array of i64 as JSON, for encoders; raises NotImplementedError for others."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} has no form in JSON")
    text = np.empty(NUMBER_BYTES * len(value) + SPARE_BYTES + 2, np.uint8)
    return msgspec.Raw(text.data[: write_numbers(value, text)])

"""What kernels tell `engine_events.py` of a batch of engine events: rows of words."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.compiled import device, words_at
from router.publisher._msgpack import Halves, Words
from router.sequence._xxh3 import u8_at

Rows = npt.NDArray[np.uint64]

FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "cache_salt",
    "locality",
)
"""What is read of an event: the first twelve are in the order of vLLM's arrays."""

EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

KIND, SEEN, EAGLE, EVENT, REASON, REASON_FIELD, PLACE, FIRST_HEAD, HEADS, VALUES = (
    np.uint64(column) for column in range(10)
)
COLUMNS = 9 + 2 * len(FIELDS)
"""A row: its kind; a bit for every field that is there and not nil; are tokens pairs; which event
it is; if it is malformed, why, in which field, at which element (from 1; 0: as a whole); of stored
events, its first head and how many there are; then two words for each field: a number and 1, or
where text begins and ends, or where hashes or tokens begin and how many there are. The second is 0
where the field is not there, or nil."""

STORED, REMOVED, CLEARED, UNKNOWN = (np.uint64(kind) for kind in range(4))
"""Kinds of rows, in the order of `EVENT_TYPES`."""

REASONS = (
    "",
    "is missing",
    "is not an array",
    "has too many blocks",
    "is not a hash",
    "is not a token",
    "is no pair that goes on from the one before",
    "is not a number from 0 to 2^32 - 1",
    "is not text",
    "is not to be found in what is neither an array nor a map",
)
MISSING, NO_LIST, TOO_MANY, NO_HASH, NO_TOKEN, NO_PAIR, NO_NUMBER, NO_TEXT, NO_EVENT = (
    np.uint64(reason) for reason in range(1, len(REASONS))
)

(
    TYPE,
    BLOCK_HASHES,
    PARENT,
    TOKEN_IDS,
    BLOCK_SIZE,
    LORA_ID,
    MEDIUM,
    LORA_NAME,
    EXTRA_KEYS,
    GROUP,
    SPEC_KIND,
    WINDOW,
    CACHE_SALT,
    LOCALITY,
    NO_FIELD,
) = (np.uint64(field) for field in range(len(FIELDS) + 1))

ROW_COUNT, TOKEN_COUNT, HASH_COUNT, HEAD_COUNT, RANK = range(5)
TOTALS = 5
"""Columns of what the reading of a batch adds up to."""

NO_RANK = 2**64 - 1

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_NAME_BYTES = 32


def _name_table(names: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """A row a name: its length, then its bytes."""
    table = np.zeros((len(names), _NAME_BYTES), np.uint8)
    for row, name in zip(table, names, strict=True):
        row[0] = len(name)
        row[1 : 1 + len(name)] = list(name.encode())
    return table


FIELD_NAMES = _name_table(FIELDS)
TYPE_NAMES = _name_table(EVENT_TYPES)


class Batch(NamedTuple):
    """What kernels read from and write to; `start`, `end` and `rows` are addresses.

    The arrays own nothing: of arrays that do, Numba would count references at every call.
    """

    start: np.uint64
    end: np.uint64
    max_blocks: np.uint64
    rows: np.uint64
    heads: Words
    tokens: Halves
    hashes: Words
    totals: Words


@device
def row_at(batch: Batch, place: np.uint64) -> Words:
    """A row of the batch."""
    columns = np.uint64(COLUMNS)
    row: Words = words_at(batch.rows + place * columns * np.uint64(8), columns)
    return row


@device
def refuse(row: Words, field: np.uint64, reason: np.uint64, place: np.uint64) -> np.uint64:
    """Say what is wrong with an event; the address that stands for none."""
    row[REASON], row[REASON_FIELD], row[PLACE] = reason, field, place
    return _0


@device
def has(row: Words, field: np.uint64) -> np.uint64:
    """Is the field there, and not nil?"""
    seen: np.uint64 = (row[SEEN] >> field) & _1
    return seen


@device
def value_of(field: np.uint64) -> np.uint64:
    """The first of a field's two columns."""
    return VALUES + _2 * field


@device
def forget(row: Words, field: np.uint64) -> None:
    """As if the field were not there."""
    row[SEEN] &= ~(_1 << field)
    row[value_of(field)], row[value_of(field) + _1] = _0, _0


@device
def note(row: Words, field: np.uint64, value: np.uint64, last: np.uint64) -> None:
    """Put a field's two words into the row."""
    row[SEEN] |= _1 << field
    row[value_of(field)], row[value_of(field) + _1] = value, last


@device
def _is_name(
    names: npt.NDArray[np.uint8], place: np.uint64, text: np.uint64, length: np.uint64
) -> bool:
    if names[place, _0] != length:
        return False
    i = _0
    while i < length and names[place, i + _1] == u8_at(text + i):
        i += _1
    return bool(i == length)


@device
def place_of(names: npt.NDArray[np.uint8], text: np.uint64, length: np.uint64) -> np.uint64:
    """Which of the names this text is; how many names there are, if it is none."""
    place, count = _0, np.uint64(len(names))
    while place < count and not _is_name(names, place, text, length):
        place += _1
    return place

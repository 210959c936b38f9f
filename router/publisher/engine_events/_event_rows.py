"""Rows of words: the form in which kernels pass a batch of engine events to `decoder.py`."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels._msgpack import Halves, Words
from router.runtime.kernels._xxh3 import u8_at
from router.runtime.kernels.numba_runtime import device, words_at

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
"""The fields read from an event; the first twelve are in the order of vLLM's arrays."""

HARMLESS_FIELDS = ("ownership", "session_id")
"""Fields of known engines that do not change what a block is, nor where it is: they are skipped.

A further field may do either: it is reported, and the rank is degraded. One that does is vLLM's
`lookahead_token_ids` (from 0.33, with EAGLE and MTP): its blocks are named by the tokens after them
as well.
"""

EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

KIND, SEEN, EAGLE, EVENT, REASON, REASON_FIELD, PLACE, FIRST_HEAD, HEADS, VALUES = (
    np.uint64(column) for column in range(10)
)
COLUMNS = 9 + 2 * len(FIELDS)
"""The columns of a row: its kind; a bit for every field that is present and not nil; whether tokens
are pairs; the index of the event; if it is malformed, the reason, the field and the element (from
1; 0: the field as a whole); of stored events, the first head and the number of heads; then two
words for each field: a number and 1, or the begin and end of text, or the begin and count of hashes
or tokens. The second word is 0 if the field is absent or nil."""

STORED, REMOVED, CLEARED, UNKNOWN = (np.uint64(kind) for kind in range(4))
"""The kinds of rows, in the order of `EVENT_TYPES`."""

REASONS = (
    "",
    "is missing",
    "is not an array",
    "has too many blocks",
    "is not a hash",
    "is not a token",
    "is not a pair that continues the previous one",
    "is not a number from 0 to 2^32 - 1",
    "is not text",
    "is missing: the event is neither an array nor a map",
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
    HARMLESS,
) = (np.uint64(field) for field in range(len(FIELDS) + 1))
UNKNOWN_FIELD = np.uint64(len(FIELDS) + len(HARMLESS_FIELDS))
"""Fields by their places in `FIELD_NAMES`; from `HARMLESS` on they are not read."""

ROW_COUNT, TOKEN_COUNT, HASH_COUNT, HEAD_COUNT, RANK, DOUBT_EVENT, DOUBT_FIRST, DOUBT_LAST = range(
    8
)
TOTALS = 8
"""Columns of the totals of a batch.

The last three name the first field that may change the meaning of its event, and is not read: the
event's kind + 1 (0: there is none), and the begin and end of the field's name. Without a name the
end is 0: the begin is its position in an array, or 0 if it is the key of a map but not text."""

NO_RANK = 2**64 - 1

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_NAME_BYTES = 32


def _name_table(names: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """Return a table with a row for each name: its length, then its bytes."""
    table = np.zeros((len(names), _NAME_BYTES), np.uint8)
    for row, name in zip(table, names, strict=True):
        row[0] = len(name)
        row[1 : 1 + len(name)] = list(name.encode())
    return table


FIELD_NAMES = _name_table(FIELDS + HARMLESS_FIELDS)
TYPE_NAMES = _name_table(EVENT_TYPES)


class Batch(NamedTuple):
    """The arrays that kernels read and write; `start`, `end` and `rows` are addresses.

    The arrays are views that own no memory: Numba would count references of owning arrays at every
    call.
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
    """Return a row of the batch."""
    columns = np.uint64(COLUMNS)
    row: Words = words_at(batch.rows + place * columns * np.uint64(8), columns)
    return row


@device
def refuse(row: Words, field: np.uint64, reason: np.uint64, place: np.uint64) -> np.uint64:
    """Record the error of an event in its row. Returns 0, the address that stands for none."""
    row[REASON], row[REASON_FIELD], row[PLACE] = reason, field, place
    return _0


@device
def has(row: Words, field: np.uint64) -> np.uint64:
    """Return 1 if the field is present and not nil, else 0."""
    seen: np.uint64 = (row[SEEN] >> field) & _1
    return seen


@device
def value_of(field: np.uint64) -> np.uint64:
    """Return the first of a field's two columns."""
    return VALUES + _2 * field


@device
def forget(row: Words, field: np.uint64) -> None:
    """Mark a field as absent."""
    row[SEEN] &= ~(_1 << field)
    row[value_of(field)], row[value_of(field) + _1] = _0, _0


@device
def note(row: Words, field: np.uint64, value: np.uint64, last: np.uint64) -> None:
    """Write a field's two words into the row."""
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
    """Return the index of the name that equals a text, or the number of names if none does."""
    place, count = _0, np.uint64(len(names))
    while place < count and not _is_name(names, place, text, length):
        place += _1
    return place

"""Parse one engine event, an array or a map, into a row.

["BlockStored", hashes, parent, tokens, …]
{"type": "BlockStored", "block_hashes": hashes, …}
"""

import numpy as np

from router.publisher.engine_events._event_rows import (
    BLOCK_HASHES,
    BLOCK_SIZE,
    CACHE_SALT,
    CLEARED,
    DOUBT_EVENT,
    DOUBT_FIRST,
    DOUBT_LAST,
    EXTRA_KEYS,
    FIELD_NAMES,
    GROUP,
    HARMLESS,
    KIND,
    LORA_ID,
    LORA_NAME,
    MEDIUM,
    MISSING,
    NO_EVENT,
    NO_TEXT,
    REMOVED,
    STORED,
    TOKEN_IDS,
    TYPE,
    TYPE_NAMES,
    UNKNOWN,
    UNKNOWN_FIELD,
    WINDOW,
    Batch,
    has,
    note,
    place_of,
    refuse,
)
from router.publisher.engine_events._field_kernel import is_read, read_field
from router.runtime.kernels._msgpack import (
    BROKEN,
    LIST,
    MAP,
    NIL,
    STRING,
    Words,
    head_at,
    skip,
)
from router.runtime.kernels.numba_runtime import device

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)


@device
def _field_of_position(batch: Batch, row: Words, at: np.uint64, position: np.uint64) -> np.uint64:
    """Return the field at a position of an event array.

    SGLang's arrays continue after the medium with salt, session id and LoRA name. They have no
    LoRA id, which vLLM always sends along with the name.
    """
    if row[KIND] == REMOVED and position >= _2:
        return MEDIUM if position == _2 else GROUP if position == _3 else UNKNOWN_FIELD
    if row[KIND] == CLEARED or position > WINDOW:
        return UNKNOWN_FIELD
    if LORA_NAME <= position <= GROUP:
        kind, _, _ = head_at(at, batch.end)
        if kind == STRING and position == LORA_NAME and not has(row, LORA_ID):
            return CACHE_SALT
        if kind == STRING and position == EXTRA_KEYS:
            return HARMLESS
        if kind == STRING and position == GROUP:
            return LORA_NAME
    return position


@device
def _read_type(batch: Batch, row: Words, at: np.uint64) -> np.uint64:
    kind, length, text = head_at(at, batch.end)
    if kind != STRING:
        return refuse(row, TYPE, NO_TEXT, _0)
    row[KIND] = place_of(TYPE_NAMES, text, length)
    note(row, TYPE, text - batch.start, text - batch.start + length)
    return _0 if row[KIND] == UNKNOWN else text + length


@device
def _first_type(batch: Batch, row: Words, at: np.uint64, count: np.uint64) -> np.uint64:
    return _read_type(batch, row, at) if count else refuse(row, TYPE, MISSING, _0)


@device
def _read_key(batch: Batch, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    kind, length, text = head_at(at, batch.end)
    if kind == STRING:
        return place_of(FIELD_NAMES, text, length), text + length
    return UNKNOWN_FIELD, skip(at, batch.end)


@device
def _find_type(batch: Batch, row: Words, at: np.uint64, count: np.uint64) -> np.uint64:
    """Read the type of an event map. The type is usually the first key, but may be any."""
    for _ in range(count):
        field, at = _read_key(batch, at)
        if at == _0:
            return at
        if field == TYPE:
            return _read_type(batch, row, at)
        at = skip(at, batch.end)
        if at == _0:
            return at
    return refuse(row, TYPE, MISSING, _0)


@device
def _is_doubtful(kind: np.uint64, field: np.uint64) -> bool:
    """Return whether a field that is not read may change the meaning of its event.

    Nothing is read of a clear: any known field may say that it clears only a part.
    """
    return bool(field == UNKNOWN_FIELD or (kind == CLEARED and TYPE < field < HARMLESS))


@device
def _note_doubtful(
    batch: Batch, row: Words, at: np.uint64, key: np.uint64, position: np.uint64, is_map: bool
) -> None:
    """Note the first doubtful field of a batch. Engines send fields that are nil for nothing."""
    kind, _, _ = head_at(at, batch.end)
    if kind in (NIL, BROKEN) or batch.totals[DOUBT_EVENT]:
        return
    first, last = position, _0
    if is_map:
        kind, length, text = head_at(key, batch.end)
        first = text - batch.start if kind == STRING else _0
        last = first + length if kind == STRING else _0
    batch.totals[DOUBT_EVENT] = row[KIND] + _1
    batch.totals[DOUBT_FIRST], batch.totals[DOUBT_LAST] = first, last


@device
def _read_fields(
    batch: Batch, row: Words, at: np.uint64, count: np.uint64, is_map: bool
) -> np.uint64:
    """Read all fields of a map, or an array's fields after its type.

    Returns the end address, or 0 if a field is malformed.
    """
    position = _0 if is_map else _1
    while position < count and at != _0:
        key = at
        if is_map:
            field, at = _read_key(batch, at)
        else:
            field = _field_of_position(batch, row, at, position)
        if at != _0 and is_read(row[KIND], field):
            at = read_field(batch, row, at, field)
        elif at != _0:
            if _is_doubtful(row[KIND], field):
                _note_doubtful(batch, row, at, key, position, is_map)
            at = skip(at, batch.end)
        position += _1
    return at


@device
def read_event(batch: Batch, row: Words, at: np.uint64) -> np.uint64:
    """Read an event into a row.

    Returns the end address, or 0 if the event is unusable; the row then contains the reason.
    """
    kind, count, inside = head_at(at, batch.end)
    if kind != LIST and kind != MAP:
        return refuse(row, TYPE, NO_EVENT, _0)
    is_map = kind == MAP
    at = _find_type(batch, row, inside, count) if is_map else _first_type(batch, row, inside, count)
    if at == _0:
        return _0
    after = _read_fields(batch, row, inside if is_map else at, count, is_map)
    if after != _0:
        if row[KIND] != CLEARED and not has(row, BLOCK_HASHES):
            return refuse(row, BLOCK_HASHES, MISSING, _0)
        if row[KIND] == STORED and not has(row, TOKEN_IDS):
            return refuse(row, TOKEN_IDS, MISSING, _0)
        if row[KIND] == STORED and not has(row, BLOCK_SIZE):
            return refuse(row, BLOCK_SIZE, MISSING, _0)
    return after

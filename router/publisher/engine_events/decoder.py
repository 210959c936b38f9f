"""The decoder of engine events, all engines and versions into one form; its scratch memory.

The decoder of engine events: all engines and versions into one form.

    vLLM 0.9 to 0.23    arrays, longer with every version   ┐
    vLLM 0.24 on        maps                                │   EngineBatch
    SGLang              arrays, then maps; signed hashes    ├─▶ rank, events, dropped events
    TensorRT-LLM        vLLM's maps, streamed               ┘
                        dictionaries, polled: `trtllm.py`

Unknown fields are skipped, and the first one of a batch is named. An event of an unknown type, or
an unreadable one, is dropped alone and reported. Kernels read a whole batch at once
(`_batch_kernel.py`): no Python object is created for a token or a hash, nor for an event that
continues the previous one.
"""

from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from router.errors import WireError
from router.protocol.values import HashArray, decode
from router.publisher.engine_events._batch_kernel import (
    BAD_RANK,
    NO_BATCH,
    TRAILING,
    TRUNCATED,
    open_batch,
    read_batch,
)
from router.publisher.engine_events._event_rows import (
    COLUMNS,
    EVENT_TYPES,
    FIELDS,
    NO_RANK,
    REASONS,
    TOTALS,
)
from router.publisher.engine_events.batch import (
    EngineBatch,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    ExtraKeys,
    StoredRun,
)
from router.sequence.hashing.block_hashes import TokenArray

_KEPT_BYTES = 1 << 18

_LOOKAHEAD = "lookahead_token_ids"


class ScratchBuffer:
    """A buffer with a token and a hash for every byte of a batch.

    Small buffers are kept for the next batch: in fresh memory every page costs a fault, a tenth of
    an event's total cost.
    """

    __slots__ = ("_hashes", "_tokens")

    def __init__(self) -> None:
        self._tokens: TokenArray = np.empty(0, np.uint32)
        self._hashes: HashArray = np.empty(0, np.uint64)

    def of(self, size_bytes: int) -> tuple[TokenArray, HashArray]:
        """Return arrays that are valid until the next call."""
        if size_bytes > _KEPT_BYTES:
            return np.empty(size_bytes, np.uint32), np.empty(size_bytes, np.uint64)
        if size_bytes > len(self._tokens):
            self._tokens, self._hashes = (
                np.empty(2 * size_bytes, np.uint32),
                np.empty(2 * size_bytes, np.uint64),
            )
        return self._tokens, self._hashes


MAX_NAME = 40
"""The number of characters of a foreign name that are shown."""


class DecodeLimits(Struct, frozen=True):
    """Limits of a batch.

    A batch beyond them is rejected; an event with too many blocks is dropped alone.
    """

    batch_bytes: int = 32 << 20
    batch_events: int = 131_072
    event_blocks: int = 65_536


DEFAULT_LIMITS = DecodeLimits()


def decode_engine_batch(
    payload: bytes, limits: DecodeLimits = DEFAULT_LIMITS, room: ScratchBuffer | None = None
) -> EngineBatch:
    """Decode an engine's message. O(bytes). `room`: a buffer to reuse across calls.

    Raises WireError if the message is no batch, exceeds a limit or has an impossible rank.
    """
    if not 0 < len(payload) <= limits.batch_bytes:
        raise WireError(f"a batch of {len(payload)} bytes (allowed: 1 to {limits.batch_bytes})")
    packed, head = np.frombuffer(payload, np.uint8), np.zeros(2, np.uint64)
    event_count = open_batch(packed, head)
    if event_count < 0:
        raise WireError(_BATCH_REASONS[event_count])
    if event_count > limits.batch_events:
        raise WireError(f"a batch of {event_count} events (allowed: {limits.batch_events})")
    rows = np.zeros((event_count, COLUMNS), np.uint64)
    heads = np.empty(3 * event_count, np.uint64)
    tokens, hashes = (room or ScratchBuffer()).of(len(payload))
    totals = np.zeros(TOTALS, np.uint64)
    elements, offset = head.tolist()
    outcome = read_batch(
        packed,
        elements,
        offset,
        event_count,
        limits.event_blocks,
        rows,
        heads,
        tokens,
        hashes,
        totals,
    )
    if outcome:
        raise WireError(_BATCH_REASONS[outcome])
    row_count, token_count, hash_count, _, rank, kind, first, last = totals.tolist()
    reader = _Reader(payload, heads, tokens[:token_count].copy(), hashes[:hash_count].copy())
    sentence = _unknown_field(payload, kind, first, last) if kind else None
    dp_rank = None if rank == NO_RANK else rank
    return reader.batch(dp_rank, rows[:row_count].tolist(), sentence)


_BATCH_REASONS = {
    NO_BATCH: "not a batch of events: not an array of a time, events and a rank",
    TRUNCATED: "a batch that is cut off or broken",
    BAD_RANK: "a batch with a rank that is not a number from 0 to 65535",
    TRAILING: "bytes after the end of a batch",
}

# Columns and kinds of rows as plain integers, to index lists; of a field, its first column.
(
    _KIND,
    _SEEN,
    _EAGLE,
    _EVENT,
    _REASON,
    _REASON_FIELD,
    _PLACE,
    _FIRST_HEAD,
    _HEADS,
    _VALUES,
) = range(10)
_STORED, _REMOVED, _CLEARED, _UNKNOWN = range(4)
(
    _TYPE,
    _BLOCK_HASHES,
    _PARENT,
    _TOKEN_IDS,
    _BLOCK_SIZE,
    _LORA_ID,
    _MEDIUM,
    _LORA_NAME,
    _EXTRA_KEYS,
    _GROUP,
    _SPEC_KIND,
    _WINDOW,
    _CACHE_SALT,
    _LOCALITY,
) = range(_VALUES, COLUMNS, 2)
# The second columns that are read for every event.
_BLOCK_COUNT, _HAS_PARENT, _TOKEN_COUNT = _BLOCK_HASHES + 1, _PARENT + 1, _TOKEN_IDS + 1
_HAS_MEDIUM, _HAS_SPEC_KIND, _HAS_WINDOW = _MEDIUM + 1, _SPEC_KIND + 1, _WINDOW + 1
_HAS_LOCALITY = _LOCALITY + 1

_Context: TypeAlias = tuple[str | None, int | None, str | None, ExtraKeys | None]
_NO_CONTEXT: _Context = (None, None, None, None)
_CONTEXT_FIELDS = sum(
    1 << FIELDS.index(name) for name in ("lora_name", "lora_id", "cache_salt", "extra_keys")
)
_USUAL_LABELS = {
    label.encode(): label for label in ("GPU", "CPU", "DISK", "full_attention", "LOCAL")
}
"""Common labels by their bytes: a lookup takes half as long as decoding."""

_extra_keys_decoder = msgspec.msgpack.Decoder(ExtraKeys)


class _Reader:
    """A converter of the kernels' rows into events."""

    __slots__ = ("_hashes", "_heads", "_payload", "_tokens")

    def __init__(
        self, payload: bytes, heads: HashArray, tokens: TokenArray, hashes: HashArray
    ) -> None:
        self._payload = payload
        self._heads = heads
        self._tokens = tokens
        self._hashes = hashes

    def batch(
        self, dp_rank: int | None, rows: list[list[int]], unknown_field: str | None
    ) -> EngineBatch:
        batch = EngineBatch(dp_rank, [], [], [], unknown_field)
        for row in rows:
            if row[_REASON]:
                batch.malformed.append(_complaint(row))
            elif row[_KIND] == _UNKNOWN:
                batch.unknown.append(bounded_name(self._label(row, _TYPE)))
            else:
                self._append_part(batch, row)
        return batch

    def _append_part(self, batch: EngineBatch, row: list[int]) -> None:
        if row[_KIND] == _REMOVED:
            batch.parts.append(self._removed(row))
        elif row[_KIND] == _CLEARED:
            batch.parts.append(EngineCleared())
        else:
            try:
                stored = self._stored(row)
            except (WireError, UnicodeDecodeError):
                event = row[_EVENT]
                batch.malformed.append(f"event {event}: text or extra_keys can not be decoded")
            else:
                batch.parts.append(stored if row[_HEADS] == 1 else self._run(stored, row))

    def _run(self, whole: EngineStored, row: list[int]) -> StoredRun:
        first = row[_FIRST_HEAD]
        return StoredRun(whole, self._heads[3 * first : 3 * (first + row[_HEADS])])

    def _stored(self, row: list[int]) -> EngineStored:
        first_hash, first_token = row[_BLOCK_HASHES], row[_TOKEN_IDS]
        return EngineStored(
            self._hashes[first_hash : first_hash + row[_BLOCK_COUNT]],
            row[_PARENT] if row[_HAS_PARENT] else None,
            self._tokens[first_token : first_token + row[_TOKEN_COUNT]],
            row[_BLOCK_SIZE],
            self._label(row, _MEDIUM) if row[_HAS_MEDIUM] else None,
            *(self._context(row) if row[_SEEN] & _CONTEXT_FIELDS else _NO_CONTEXT),
            row[_GROUP],
            self._label(row, _SPEC_KIND) if row[_HAS_SPEC_KIND] else None,
            row[_WINDOW] if row[_HAS_WINDOW] else None,
            row[_EAGLE] == 1,
            self._label(row, _LOCALITY) if row[_HAS_LOCALITY] else None,
        )

    def _context(self, row: list[int]) -> _Context:
        """Return LoRA, salt and extra keys, which most events do not have."""
        return (
            self._bytes(row, _LORA_NAME).decode() if row[_LORA_NAME + 1] else None,
            row[_LORA_ID] if row[_LORA_ID + 1] else None,
            self._bytes(row, _CACHE_SALT).decode() if row[_CACHE_SALT + 1] else None,
            self._extra_keys(row) if row[_EXTRA_KEYS + 1] else None,
        )

    def _removed(self, row: list[int]) -> EngineRemoved:
        return EngineRemoved(
            self._hashes_of(row),
            self._label(row, _MEDIUM) if row[_HAS_MEDIUM] else None,
            row[_GROUP],
            self._label(row, _LOCALITY) if row[_HAS_LOCALITY] else None,
        )

    def _hashes_of(self, row: list[int]) -> HashArray:
        first = row[_BLOCK_HASHES]
        return self._hashes[first : first + row[_BLOCK_COUNT]]

    def _extra_keys(self, row: list[int]) -> ExtraKeys:
        return decode(_extra_keys_decoder.decode, self._bytes(row, _EXTRA_KEYS))

    def _label(self, row: list[int], field: int) -> str:
        """Return text that is only compared with known labels; invalid UTF-8 is escaped."""
        text = self._payload[row[field] : row[field + 1]]
        return _USUAL_LABELS.get(text) or text.decode(errors="backslashreplace")

    def _bytes(self, row: list[int], field: int) -> bytes:
        return self._payload[row[field] : row[field + 1]]


def bounded_name(name: str) -> str:
    """Return a foreign name, shortened and printable."""
    return ascii(name[:MAX_NAME])[1:-1]


def unknown_field(field: str) -> str:
    """Return the sentence about a field that this version does not know."""
    return (
        f"events carry {field}, which this version does not know: "
        "blocks may be other than announced"
    )


def _of_lookahead(field: str) -> str:
    """Return the sentence about blocks that differ if the tokens after them do."""
    return (
        f"events carry {field}: blocks of equal tokens differ if the tokens after them do, "
        "so an overlap may be a block too high"
    )


def _unknown_field(payload: bytes, kind: int, first: int, last: int) -> str:
    """Return the sentence about the field that the kernels noted, without its value."""
    event = EVENT_TYPES[kind - 1]
    if last:
        name = payload[first : min(last, first + 4 * MAX_NAME)].decode(errors="backslashreplace")
        sentence = _of_lookahead if name == _LOOKAHEAD else unknown_field
        return sentence(f"the field `{bounded_name(name)}` of {event}")
    return unknown_field(
        f"field {first} of {event}" if first else f"a field of {event} whose name is not text"
    )


def _complaint(row: list[int]) -> str:
    """Return the error of an event, without any text of the event."""
    field, place = FIELDS[row[_REASON_FIELD]], row[_PLACE]
    kind = f" ({EVENT_TYPES[row[_KIND]]})" if row[_REASON_FIELD] else ""
    element = f"[{place - 1}]" if place else ""
    return f"event {row[_EVENT]}{kind}: {field}{element} {REASONS[row[_REASON]]}"

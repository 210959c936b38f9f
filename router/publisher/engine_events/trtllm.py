"""The decoder of TensorRT-LLM's responses with cache events: dictionaries, or JSON of them.

    {"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data":
        {"type": "created", "num_blocks_per_cache_level": […]}
        {"type": "stored", "parent_hash": …, "blocks": [{"block_hash", "tokens", "cache_level", …}]}
        {"type": "removed", "block_hashes": […]}
        {"type": "updated", "block_hash": …, "cache_level": {"old_value", "new_value"}}}

Source: `KVCacheEventSerializer` (NVIDIA/TensorRT-LLM, `tensorrt_llm/_utils.py`). A block is in one
cache level at a time. The events that it streams over ZMQ are in vLLM's format. Unknown fields are
named as by `decoder.py`; those of tokens are not looked for. Events of several windows are those of
a hybrid model: a block counts while any window holds it, which is an upper bound of what is reused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, starmap
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from router.errors import WireError
from router.protocol.values import U64_MAX, DpRank, HashArray, TokenId, UInt, decode
from router.publisher.engine_events.batch import (
    EngineBatch,
    EngineEvent,
    EnginePart,
    EngineRemoved,
    EngineStored,
)
from router.publisher.engine_events.decoder import (
    DEFAULT_LIMITS,
    DecodeLimits,
    bounded_name,
    unknown_field,
)
from router.sequence.hashing.block_hashes import token_array

_LEVEL_MEDIUMS = ("GPU", "CPU")
"""vLLM's names of media, by cache level."""

_TYPES = ("created", "stored", "removed", "updated")


class TrtllmBatch(EngineBatch, frozen=True, eq=False, kw_only=True):
    """Events of one rank with consecutive ids; `created` events only take an id."""

    first_event_id: int
    last_event_id: int


class TrtllmAnswer(Struct, frozen=True, eq=False):
    """All events of one response; a gap in a rank's ids starts a new batch."""

    batches: list[TrtllmBatch]
    malformed: list[str]
    """A sentence for each element that is not an event of any rank."""


class _Token(Struct, frozen=True):
    token_id: TokenId
    token_extra_id: UInt = 0


class _MmKey(Struct, frozen=True):
    hash: str
    start_offset: int


class _Block(Struct, frozen=True):
    block_hash: int
    tokens: list[_Token]
    cache_level: UInt = 0
    lora_id: UInt | None = None
    cache_salt: str | None = None
    mm_keys: list[_MmKey] = []


class _Created(Struct, frozen=True, tag="created"):
    pass


class _Stored(Struct, frozen=True, tag="stored"):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(Struct, frozen=True, tag="removed"):
    block_hashes: list[int]
    cache_level: UInt | None = None


class _LevelChange(Struct, frozen=True):
    old_value: UInt
    new_value: UInt


class _Updated(Struct, frozen=True, tag="updated"):
    block_hash: int
    cache_level: _LevelChange | None = None


class _Envelope(Struct, frozen=True):
    event_id: UInt
    data: dict[str, object]
    window_size: UInt | None = None
    attention_dp_rank: DpRank | None = None


_Data: TypeAlias = _Created | _Stored | _Removed | _Updated

_HARMLESS_FIELDS = ("type", "priority", "num_blocks_per_cache_level", "hash_algo")
"""Fields that change neither what a block is nor where it is."""

_KNOWN_FIELDS: dict[type[Struct], frozenset[str]] = {
    kind: frozenset((*kind.__struct_fields__, *_HARMLESS_FIELDS))
    for kind in (_Envelope, _Block, _Created, _Stored, _Removed, _Updated)
}


class _Event(Struct, frozen=True):
    """An event, and the first field beside its data that this version does not know."""

    envelope: _Envelope
    unknown_field: str | None


_json_decoder = msgspec.json.Decoder(list[object])


def decode_trtllm_events(
    answer: bytes | Sequence[object],
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> TrtllmAnswer:
    """Decode events as `get_kv_cache_events` returns them, or their JSON.

    O(bytes), slower than streamed events. Raises WireError if the whole is no array, or exceeds a
    limit.
    """
    if isinstance(answer, bytes):
        _check("bytes", len(answer), limits.batch_bytes)
        answer = decode(_json_decoder.decode, answer)
    _check("events", len(answer), limits.batch_events)
    malformed: list[str] = []
    events: list[_Event] = []
    for place, element in enumerate(answer):
        try:
            envelope = _convert(element, _Envelope)
        except WireError:
            malformed.append(f"event {place}: no event with an id, data and a rank")
        else:
            events.append(_Event(envelope, _unknown_of(element, _Envelope)))
    return TrtllmAnswer([_batch(run, limits) for run in _runs(events)], malformed)


def _runs(events: Iterable[_Event]) -> list[list[_Event]]:
    """Return each rank's events, divided where an id is missing."""
    runs: list[list[_Event]] = []
    current: dict[int | None, list[_Event]] = {}
    for event in events:
        dp_rank = event.envelope.attention_dp_rank
        run = current.get(dp_rank)
        if run is None or run[-1].envelope.event_id + 1 != event.envelope.event_id:
            run = current[dp_rank] = []
            runs.append(run)
        run.append(event)
    return runs


def _batch(run: Sequence[_Event], limits: DecodeLimits) -> TrtllmBatch:
    first, last = run[0].envelope, run[-1].envelope
    parts: list[EnginePart] = []
    unknown: list[str] = []
    malformed: list[str] = []
    found: str | None = None
    for event in run:
        kind = event.envelope.data.get("type")
        if isinstance(kind, str) and kind not in _TYPES:
            unknown.append(bounded_name(kind))
            continue
        try:
            data: _Data = _convert(event.envelope.data, _Data)
            parts.extend(_events(data, limits))
        except WireError:
            malformed.append(f"event {event.envelope.event_id}: not what its type promises")
        else:
            found = found or event.unknown_field or _unknown_in(event.envelope.data, data)
    return TrtllmBatch(
        first.attention_dp_rank,
        parts,
        unknown,
        malformed,
        found,
        has_full_only=len({event.envelope.window_size for event in run} - {None}) > 1,
        first_event_id=first.event_id,
        last_event_id=last.event_id,
    )


def _unknown_in(fields: Mapping[str, Any], data: _Data) -> str | None:
    """Return the sentence about the first unknown field of an event's data, None without one."""
    blocks = fields["blocks"] if isinstance(data, _Stored) else ()
    objects = chain([(fields, type(data))], ((block, _Block) for block in blocks))
    return next(filter(None, starmap(_unknown_of, objects)), None)


def _unknown_of(fields: object, kind: type[Struct]) -> str | None:
    """Return the sentence about the first unknown field of an object that converts to `kind`."""
    if not isinstance(fields, Mapping) or fields.keys() <= _KNOWN_FIELDS[kind]:
        return None
    known = _KNOWN_FIELDS[kind]
    names = (str(name) for name, value in fields.items() if name not in known and value is not None)
    name = next(names, None)
    return None if name is None else unknown_field(f"the field `{bounded_name(name)}`")


def _events(data: _Data, limits: DecodeLimits) -> list[EngineEvent]:
    if isinstance(data, _Stored):
        _check("blocks", len(data.blocks), limits.event_blocks)
        return [*_stored(data)]
    if isinstance(data, _Removed):
        _check("blocks", len(data.block_hashes), limits.event_blocks)
        return [*_removed(data)]
    if isinstance(data, _Updated) and data.cache_level is not None:
        return [*_moved(data.block_hash, data.cache_level)]
    return []


def _stored(data: _Stored) -> Iterator[EngineStored]:
    parent = None if data.parent_hash is None else int(_hashes([data.parent_hash])[0])
    for _, alike in groupby(data.blocks, key=_kinship):
        blocks = list(alike)
        extra_keys = tuple(_extra_keys(block) for block in blocks)
        hashes = _hashes([block.block_hash for block in blocks])
        yield EngineStored(
            hashes,
            parent,
            token_array([token.token_id for block in blocks for token in block.tokens]),
            len(blocks[0].tokens),
            _medium(blocks[0].cache_level),
            lora_id=blocks[0].lora_id,
            cache_salt=blocks[0].cache_salt,
            extra_keys=extra_keys if any(extra_keys) else None,
        )
        parent = int(hashes[-1])


def _removed(data: _Removed) -> Iterator[EngineRemoved]:
    """Yield removals; an event without a cache level removes the blocks from all levels."""
    hashes, level = _hashes(data.block_hashes), data.cache_level
    for medium in _LEVEL_MEDIUMS if level is None else (_medium(level),):
        yield EngineRemoved(hashes, medium)


def _moved(block_hash: int, levels: _LevelChange) -> Iterator[EngineEvent]:
    hashes, new, old = _hashes([block_hash]), _medium(levels.new_value), _medium(levels.old_value)
    yield EngineStored(hashes, None, token_array([]), 0, new)
    yield EngineRemoved(hashes, old)


def _kinship(block: _Block) -> tuple[object, ...]:
    """Return the fields that blocks must share to be in one event."""
    return (block.cache_level, len(block.tokens), block.lora_id, block.cache_salt)


def _extra_keys(block: _Block) -> tuple[object, ...] | None:
    """Return multimodal objects in vLLM's form, then a key with extra token ids, or None."""
    keys: list[object] = [[key.hash, key.start_offset] for key in block.mm_keys]
    if any(token.token_extra_id for token in block.tokens):
        keys.append(["token_extra_ids", *(token.token_extra_id for token in block.tokens)])
    return tuple(keys) or None


def _medium(level: int) -> str:
    return _LEVEL_MEDIUMS[level] if level < len(_LEVEL_MEDIUMS) else f"level {level}"


def _hashes(values: Sequence[int]) -> HashArray:
    if any(not -(2**63) <= value <= U64_MAX for value in values):
        raise WireError("a hash of more than 64 bits")
    return np.array([value & U64_MAX for value in values], np.uint64)


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise WireError(f"{count} {what} (allowed: {limit})")


def _convert(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WireError(str(error)) from error

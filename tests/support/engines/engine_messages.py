"""What engines send, in the Structs they send it with, and an exact model of what is read of it."""

from itertools import pairwise

import msgspec
import xxhash

U64 = 2**64


class Map(msgspec.Struct, tag=True, omit_defaults=True):
    """Events of vLLM from 0.24, and of SGLang from late 2026."""


class Array(msgspec.Struct, tag=True, array_like=True):
    """Events before that."""


class Vllm9Stored(Array, tag="BlockStored"):
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_id: int | None = None


class Vllm10Stored(Vllm9Stored, tag="BlockStored"):
    medium: str | None = None


class Vllm12Stored(Vllm10Stored, tag="BlockStored"):
    lora_name: str | None = None


class Vllm16Stored(Vllm12Stored, tag="BlockStored"):
    extra_keys: list | None = None


class Vllm23Stored(Vllm16Stored, tag="BlockStored"):
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Vllm9Removed(Array, tag="BlockRemoved"):
    block_hashes: list


class Vllm10Removed(Vllm9Removed, tag="BlockRemoved"):
    medium: str | None = None


class Vllm23Removed(Vllm10Removed, tag="BlockRemoved"):
    group_idx: int | None = None


class ArrayCleared(Array, tag="AllBlocksCleared"):
    pass


class SglangArrayStored(Vllm10Stored, tag="BlockStored"):
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class Vllm33Stored(Map, tag="BlockStored"):
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list | None = None


class SglangStored(Map, tag="BlockStored"):
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class MapRemoved(Map, tag="BlockRemoved"):
    block_hashes: list
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class MapCleared(Map, tag="AllBlocksCleared"):
    pass


def payload(*events, rank=0):
    return msgspec.msgpack.encode([1700000000.5, events, rank])


def plain(event):
    """A value read from an engine as something that compares."""
    return {
        "type": type(event).__name__,
        **{
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in msgspec.structs.asdict(event).items()
        },
    }


class Unreadable(Exception):
    pass


ARRAY_FIELDS = {
    "BlockStored": [
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
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}


def model(events):
    """What is read of events as MessagePack brings them: values, unknown types, how many malformed.

    Removals are joined.
    """
    read, unknown, malformed = [], [], 0
    for event in events:
        try:
            kind, fields = _fields(event)
            if kind in _READ:
                _append(read, _READ[kind](fields))
                continue
            unknown.append(kind)
        except Unreadable:
            malformed += 1
        read.append(None)  # nothing is joined across what was dropped
    return [event for event in read if event is not None], unknown, malformed


def _append(read, event):
    before = (read[-1] if read else None) or {}
    is_removal = event["type"] == "EngineRemoved"
    if is_removal and {**event, "block_hashes": 0} == {**before, "block_hashes": 0}:
        before["block_hashes"] += event["block_hashes"]
    else:
        read.append(event)


def _fields(event):
    if isinstance(event, dict):
        if not isinstance(event.get("type"), str):
            raise Unreadable
        return event["type"], event
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        raise Unreadable
    names = ARRAY_FIELDS.get(event[0], [])
    fields = dict(zip(names, event[1:], strict=False))
    if event[0] == "BlockStored":
        _as_sglang(fields)
    return event[0], fields


def _as_sglang(fields):
    if isinstance(fields.get("lora_name"), str) and fields["lora_id"] is None:
        fields["cache_salt"] = fields.pop("lora_name")
    if isinstance(fields.get("extra_keys"), str):
        del fields["extra_keys"]
    if isinstance(fields.get("group_idx"), str):
        fields["lora_name"] = fields.pop("group_idx")


def _stored(fields):
    tokens = _list(fields, "token_ids")
    is_eagle = bool(tokens) and isinstance(tokens[0], list)
    keys = fields.get("extra_keys")
    return {
        "type": "EngineStored",
        "block_hashes": _hashes(fields),
        "parent": _parent(fields),
        "tokens": _flat(tokens) if is_eagle else [_number(token) for token in tokens],
        "block_size": _number(fields.get("block_size")),
        "medium": _text(fields, "medium"),
        "lora_name": _text(fields, "lora_name"),
        "lora_id": _optional(fields, "lora_id", U64),
        "cache_salt": _text(fields, "cache_salt"),
        "extra_keys": None if keys is None else _extra_keys(keys),
        "group": _optional(fields, "group_idx") or 0,
        "spec_kind": _text(fields, "kv_cache_spec_kind"),
        "sliding_window_tokens": _optional(fields, "kv_cache_spec_sliding_window"),
        "is_eagle": is_eagle,
        "locality": _text(fields, "locality"),
        "local_hashes": None,
    }


def _removed(fields):
    return {
        "type": "EngineRemoved",
        "block_hashes": _hashes(fields),
        "medium": _text(fields, "medium"),
        "group": _optional(fields, "group_idx") or 0,
        "locality": _text(fields, "locality"),
    }


_READ = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": lambda _: {"type": "EngineCleared", "tier": None},
}


def _hashes(fields):
    return [_hash(value) for value in _list(fields, "block_hashes")]


def _hash(value):
    if isinstance(value, bytes) and len(value) == 32:
        return xxhash.xxh3_64_intdigest(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value % U64
    raise Unreadable


def _parent(fields):
    parent = fields.get("parent_block_hash")
    return None if parent is None else _hash(parent)


def _flat(pairs):
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Unreadable
    if any(one[1] != other[0] for one, other in pairwise(pairs)):
        raise Unreadable
    return [_number(token) for token in [*(pair[0] for pair in pairs), pairs[-1][1]]]


def _extra_keys(keys):
    if not isinstance(keys, list) or not all(k is None or isinstance(k, list) for k in keys):
        raise Unreadable
    if all(k is None for k in keys):
        return None
    return tuple(None if k is None else tuple(k) for k in keys)


def _list(fields, name):
    if not isinstance(fields.get(name), list):
        raise Unreadable
    return fields[name]


def _number(value, limit=2**32):
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise Unreadable
    return value


def _optional(fields, name, limit=2**32):
    return None if fields.get(name) is None else _number(fields[name], limit)


def _text(fields, name):
    value = fields.get(name)
    if not (value is None or isinstance(value, str)):
        raise Unreadable
    return value

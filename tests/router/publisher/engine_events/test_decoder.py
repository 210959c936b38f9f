"""Every format of every engine is read, and what can not be read is dropped alone."""

import contextlib
import json
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.errors import WireError
from router.publisher.engine_events.batch import EngineCleared, EngineRemoved, EngineStored
from router.publisher.engine_events.decoder import (
    MAX_NAME,
    DecodeLimits,
    bounded_name,
    decode_engine_batch,
    unknown_field,
)
from support.chaos.fuzzing import examples
from support.engines.engine_messages import (
    ARRAY_FIELDS,
    U64,
    ArrayCleared,
    MapCleared,
    MapRemoved,
    SglangArrayStored,
    SglangStored,
    Vllm9Removed,
    Vllm9Stored,
    Vllm10Removed,
    Vllm10Stored,
    Vllm12Stored,
    Vllm16Stored,
    Vllm23Stored,
    Vllm33Stored,
    model,
    payload,
    plain,
)

VECTORS = json.loads(
    (Path(__file__).parents[3] / "vectors" / "engine_events.json").read_text("utf-8")
)
TOKENS = list(range(100, 132))
STORED_FORMS = {
    "vllm 0.9": Vllm9Stored([1, 2], 7, TOKENS, 16),
    "vllm with a medium": Vllm10Stored([1, 2], 7, TOKENS, 16, None, "GPU"),
    "vllm with a LoRA name": Vllm12Stored([1, 2], 7, TOKENS, 16, 3, "GPU", "ad"),
    "vllm with extra keys": Vllm16Stored([1, 2], 7, TOKENS, 16, 3, "GPU", "ad", [["ad"], ["ad"]]),
    "vllm 0.23": Vllm23Stored(
        [1, 2], 7, TOKENS, 16, None, "GPU", None, [["s"], None], 2, "sliding_window", 1024
    ),
    "vllm 0.33": Vllm33Stored([1, 2], 7, TOKENS, 16, None, "CPU", None),
    "sglang arrays": SglangArrayStored([-1, 2], -7, TOKENS, 16, None, "GPU", "s", "session", "ad"),
    "sglang maps": SglangStored([-1, 2], -7, TOKENS, 16, None, "DISK", "s", "session", "ad"),
    "pairs": SglangStored([1, 2], 7, [[t, t + 1] for t in TOKENS], 16, None),
    "bytes": Vllm33Stored([b"h" * 32], b"p" * 32, TOKENS[:16], 16, None, None, None),
}


def read_back(*events):
    """Through bytes, and back into plain MessagePack values for the model."""
    packed = payload(*events)
    return packed, msgspec.msgpack.decode(packed)[1]


def agrees_with_the_model(packed, events):
    batch = decode_engine_batch(packed)
    expected, unknown, malformed = model(events)
    assert [plain(event) for event in batch.events] == expected
    assert batch.unknown == [bounded_name(name) for name in unknown]
    assert len(batch.malformed) == malformed
    return batch


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors_of_real_engines(vector):
    packed = bytes.fromhex(vector["payload_hex"])
    batch = agrees_with_the_model(packed, msgspec.msgpack.decode(packed)[1])
    assert batch.dp_rank == (vector["decoded"][2] if len(vector["decoded"]) > 2 else None)
    assert len(batch.events) > 0


@pytest.mark.parametrize("name", STORED_FORMS)
def test_every_form_of_a_stored_event(name):
    agrees_with_the_model(*read_back(STORED_FORMS[name]))


def test_fields_are_where_each_engine_puts_them():
    lora, full, salted, mapped = (
        decode_engine_batch(payload(STORED_FORMS[name])).events[0]
        for name in ("vllm with a LoRA name", "vllm 0.23", "sglang arrays", "sglang maps")
    )
    assert (lora.lora_name, lora.lora_id, lora.cache_salt) == ("ad", 3, None)
    assert (full.group, full.spec_kind, full.sliding_window_tokens) == (2, "sliding_window", 1024)
    assert full.extra_keys == (("s",), None)
    assert (salted.lora_name, salted.cache_salt, salted.medium) == ("ad", "s", "GPU")
    assert (mapped.lora_name, mapped.cache_salt, mapped.medium) == ("ad", "s", "DISK")
    assert salted.block_hashes.tolist() == [U64 - 1, 2]
    assert salted.parent == U64 - 7


def test_pairs_become_one_token_more_than_the_blocks_have():
    (event,) = decode_engine_batch(payload(STORED_FORMS["pairs"])).events
    assert event.is_eagle
    assert event.tokens.tolist() == [*TOKENS, TOKENS[-1] + 1]


def test_extra_keys_of_nothing_are_none():
    event = Vllm16Stored([1, 2], None, TOKENS, 16, None, "GPU", None, [None, None])
    assert decode_engine_batch(payload(event)).events[0].extra_keys is None


def test_removals_of_one_medium_and_group_are_joined():
    removed = [MapRemoved([n], "GPU") for n in range(5)]
    others = [MapRemoved([5], "CPU"), MapRemoved([6, 7], "CPU"), MapRemoved([8], "CPU", 1)]
    batch = decode_engine_batch(payload(*removed, *others, MapCleared(), MapRemoved([9], "CPU", 1)))
    assert [
        event.block_hashes.tolist() for event in batch.events if isinstance(event, EngineRemoved)
    ] == [[0, 1, 2, 3, 4], [5, 6, 7], [8], [9]]


def test_one_bad_event_leaves_its_neighbours():
    good = STORED_FORMS["vllm 0.33"]
    bad = Vllm33Stored([3], None, [1.5], 16, None, "GPU", None)
    batch = decode_engine_batch(
        payload(good, bad, {"type": "BlockPinned"}, good, 7, ArrayCleared())
    )
    assert [type(event) for event in batch.events] == [EngineStored, EngineStored, EngineCleared]
    assert [event.tokens.tolist() for event in batch.events[:2]] == [TOKENS, TOKENS]
    assert batch.unknown == ["BlockPinned"]
    assert batch.malformed == [
        "event 1 (BlockStored): token_ids[0] is not a token",
        "event 4: type is missing: the event is neither an array nor a map",
    ]


def test_the_tag_may_stand_anywhere_in_a_map():
    event = {"medium": "GPU", 5: 6, "block_hashes": [1], "type": "BlockRemoved"}
    (removed,) = decode_engine_batch(payload(event)).events
    assert (removed.block_hashes.tolist(), removed.medium) == ([1], "GPU")


def test_foreign_names_are_cut_short_and_payloads_not_repeated():
    secret = "s" * 1000
    batch = decode_engine_batch(
        payload({"type": secret + "\n"}, Vllm9Removed([secret]), Vllm9Removed([1, secret]))
    )
    assert batch.unknown == ["s" * MAX_NAME]
    assert batch.malformed == [
        "event 1 (BlockRemoved): block_hashes[0] is not a hash",
        "event 2 (BlockRemoved): block_hashes[1] is not a hash",
    ]


def test_bytes_that_are_no_text_cost_the_event_only_where_they_name_what_is_cached():
    packed = payload(Vllm33Stored([1], None, TOKENS[:16], 16, None, "GPU", "adapter"))
    (read,) = decode_engine_batch(packed.replace(b"GPU", b"G\xffU")).events
    assert read.medium == "G\\xffU"
    batch = decode_engine_batch(packed.replace(b"adapter", b"ad\xffpter"))
    assert batch.events == []
    assert batch.malformed == ["event 0: text or extra_keys can not be decoded"]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode([1.0, [], -1]),
        msgspec.msgpack.encode([1.0, [], 65_536]),
        msgspec.msgpack.encode([1.0, [], "0"]),
        msgspec.msgpack.encode([1.0, [], 0]) + b"\x00",
        payload(STORED_FORMS["vllm 0.33"])[:-3],
        b"\x93\x01\xdd\xff\xff\xff\xff\x00",
    ],
)
def test_invalid_batch_is_refused_whole(packed):
    with pytest.raises(WireError):
        decode_engine_batch(packed)


@pytest.mark.parametrize("rank", [None, 0, 65_535])
def test_the_rank_may_be_missing_or_nil(rank):
    assert decode_engine_batch(payload(rank=rank)).dp_rank == rank
    assert decode_engine_batch(msgspec.msgpack.encode([1.0, []])).dp_rank is None
    assert decode_engine_batch(msgspec.msgpack.encode([1.0, [], rank, "later", {}])).dp_rank == rank


def test_limits():
    event = Vllm10Removed([1, 2, 3], "GPU")
    packed = payload(event, event)
    limits = DecodeLimits(batch_bytes=len(packed), batch_events=2, event_blocks=3)
    assert len(decode_engine_batch(packed, limits).events) == 1
    for narrower in ({"batch_bytes": len(packed) - 1}, {"batch_events": 1}):
        with pytest.raises(WireError, match="allowed"):
            decode_engine_batch(packed, msgspec.structs.replace(limits, **narrower))
    fewer_blocks = decode_engine_batch(packed, msgspec.structs.replace(limits, event_blocks=2))
    assert fewer_blocks.malformed[0] == "event 0 (BlockRemoved): block_hashes has too many blocks"


def test_lengths_are_not_believed():
    packed = bytearray(payload(Vllm9Removed([1, 2])))
    packed[packed.index(b"\x92\x01\x02")] = 0x9F
    with pytest.raises(WireError):
        decode_engine_batch(bytes(packed))


def test_depth_costs_no_stack():
    deep = b"\x91" * 100_000 + b"\xc0"
    unknown = b"\x82\xa4type\xabBlockPinned\xa1x" + deep
    stored = b"\x99\xabBlockStored\x90\xc0\x90\x10\xc0\xc0\xc0\x91\x91" + deep
    batch = decode_engine_batch(b"\x92\x01\x92" + unknown + stored)
    assert batch.unknown == ["BlockPinned"]
    assert batch.malformed == ["event 1: text or extra_keys can not be decoded"]


WIDTHS = {"B": 0xCC, "H": 0xCD, "I": 0xCE, "Q": 0xCF, "b": 0xD0, "h": 0xD1, "i": 0xD2, "q": 0xD3}
edges = st.sampled_from([0, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31, 2**32 - 1])


@st.composite
def packed_integers(draw, numbers):
    """An integer, and one of the ways that it may be written."""
    number = draw(numbers)
    ways = [b""] if -32 <= number < 128 else []
    for code, byte in WIDTHS.items():
        try:
            ways.append(bytes([byte]) + struct.pack(">" + code, number))
        except struct.error:
            continue
    way = draw(st.sampled_from(ways))
    return number, way or struct.pack("b", number)


def array_of(packed):
    return b"\xdd" + struct.pack(">I", len(packed)) + b"".join(packed)


@given(
    st.lists(packed_integers(edges | st.integers(0, 2**32 - 1)), max_size=70),
    st.lists(packed_integers(st.integers(-(2**63), 2**64 - 1)), max_size=20),
)
def test_integers_of_every_width(tokens, hashes):
    event = b"\x95\xabBlockStored" + array_of([packed for _, packed in hashes]) + b"\xc0"
    event += array_of([packed for _, packed in tokens]) + b"\x10"
    packed = b"\x92\x01\x91" + event
    (read,) = decode_engine_batch(packed).events
    _, plain_hashes, _, plain_tokens, _ = msgspec.msgpack.decode(packed)[1][0]
    assert read.tokens.dtype == np.uint32
    assert read.tokens.tolist() == plain_tokens == [number for number, _ in tokens]
    assert read.block_hashes.tolist() == [number % U64 for number in plain_hashes]


hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=32, max_size=32)
token_lists = st.lists(edges | st.integers(0, 2**32 - 1), max_size=20)
texts = st.none() | st.sampled_from(["GPU", "CPU", "", "é"])
small = st.none() | st.integers(0, 3)
garbage = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=33),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=3)
    ),
    max_leaves=10,
)
STORED_FIELDS = {
    "block_hashes": st.lists(hashes, max_size=4),
    "parent_block_hash": st.none() | hashes,
    "token_ids": token_lists
    | token_lists.map(lambda tokens: [list(pair) for pair in pairwise(tokens)]),
    "block_size": st.integers(0, 64),
    "lora_id": small,
    "medium": texts,
    "lora_name": texts,
    "extra_keys": st.none() | st.lists(st.none() | st.lists(garbage, max_size=2), max_size=3),
    "group_idx": small,
    "kv_cache_spec_kind": texts,
    "kv_cache_spec_sliding_window": small,
}
stored_fields = st.fixed_dictionaries(STORED_FIELDS)
removed_fields = st.fixed_dictionaries(
    {"block_hashes": st.lists(hashes, max_size=3), "medium": texts, "group_idx": small}
)
known_keys = st.sampled_from([*STORED_FIELDS, "type", "cache_salt", "locality"])


@st.composite
def engine_events(draw):
    """Good ones of both eras, ones with a field changed, and anything at all."""
    kind, fields = draw(
        stored_fields.map(lambda fields: ("BlockStored", fields))
        | removed_fields.map(lambda fields: ("BlockRemoved", fields))
        | st.just(("AllBlocksCleared", {}))
    )
    if draw(st.booleans()):
        event = [kind, *fields.values()][: draw(st.integers(4, 12))]
        if draw(st.integers(0, 3)) == 0:
            event[draw(st.integers(0, len(event) - 1))] = draw(garbage)
        return event
    event = {"type": kind, **fields}
    if draw(st.integers(0, 3)) == 0:
        event[draw(known_keys)] = draw(garbage)
    return event


@settings(max_examples=examples(50))
@given(st.lists(engine_events() | garbage, max_size=6))
@example([["BlockRemoved", [1], "GPU"], ["BlockRemoved", [2.5], "GPU"], ["BlockRemoved", [3]]])
def test_garbage_anywhere_costs_only_its_own_event(events):
    agrees_with_the_model(msgspec.msgpack.encode([1.0, events, 3]), events)


KNOWN_NAMES = {*STORED_FIELDS, "type", "cache_salt", "locality"}
HARMLESS_NAMES = ["ownership", "session_id"]
names_of_fields = st.sampled_from([*HARMLESS_NAMES, "tenant", "é", ""]) | st.text(max_size=60)


@st.composite
def extended_events(draw):
    """Good events with further fields, and the first of these that is neither null nor harmless."""
    kind, fields = draw(
        stored_fields.map(lambda fields: ("BlockStored", fields))
        | removed_fields.map(lambda fields: ("BlockRemoved", fields))
        | st.just(("AllBlocksCleared", {}))
    )
    if draw(st.booleans()):
        extra = draw(st.lists(garbage, max_size=3))
        places = (place for place, value in enumerate(extra, 1 + len(fields)) if value is not None)
        first = next((f"field {place} of {kind}" for place in places), None)
        return [kind, *(fields[name] for name in ARRAY_FIELDS[kind]), *extra], first
    extra = draw(st.dictionaries(names_of_fields.filter(lambda n: n not in KNOWN_NAMES), garbage))
    doubtful = (name for name in extra if name not in HARMLESS_NAMES and extra[name] is not None)
    first = next((f"the field `{bounded_name(name)}` of {kind}" for name in doubtful), None)
    return {"type": kind, **fields, **extra}, first


@settings(max_examples=examples(80))
@given(st.lists(extended_events(), max_size=4))
def test_first_unknown_field_is_named_and_changes_no_block(extended):
    events = [event for event, _ in extended]
    batch = agrees_with_the_model(msgspec.msgpack.encode([1.0, events, 3]), events)
    first = next((field for _, field in extended if field is not None), None)
    expected = None if first is None else unknown_field(first)
    assert batch.unknown_field == expected
    assert batch.malformed == []


def test_blocks_that_are_named_by_the_tokens_after_them_too_are_doubted():
    event = Vllm33Stored([1], 7, TOKENS[:16], 16, None, "GPU", None, lookahead_token_ids=[[9]])
    batch = decode_engine_batch(payload(event))
    assert "`lookahead_token_ids` of BlockStored" in batch.unknown_field
    assert "a block too high" in batch.unknown_field


@pytest.mark.parametrize("name", STORED_FORMS)
def test_no_form_of_a_known_engine_has_an_unknown_field(name):
    assert decode_engine_batch(payload(STORED_FORMS[name])).unknown_field is None


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"type": "AllBlocksCleared", "medium": "CPU"}, "the field `medium` of AllBlocksCleared"),
        (["AllBlocksCleared", "CPU"], "field 1 of AllBlocksCleared"),
        ({**msgspec.to_builtins(MapRemoved([1])), 5: 6}, "a field of BlockRemoved whose name is"),
        ({**msgspec.to_builtins(MapRemoved([1])), "s" * 1000: 6}, f"the field `{'s' * MAX_NAME}`"),
        ({"type": "BlockPinned", "tenant": 1}, None),
        (MapCleared(), None),
    ],
)
def test_unknown_fields_are_named_by_position_or_by_a_bounded_name(event, field):
    found = decode_engine_batch(payload(event)).unknown_field
    assert (found is None) == (field is None)
    assert (field or "") in (found or "")


@settings(max_examples=examples(50))
@given(st.data())
def test_changed_bytes_never_raise_anything_else(data):
    packed = bytearray(payload(*data.draw(st.lists(engine_events(), max_size=4))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(packed) - 1))
        packed[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not packed:
            break
    with contextlib.suppress(WireError):
        decode_engine_batch(bytes(packed))


@given(st.binary(max_size=40))
def test_any_bytes_never_raise_anything_else(packed):
    with contextlib.suppress(WireError):
        decode_engine_batch(packed)

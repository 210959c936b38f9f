"""Events that TensorRT-LLM is asked for, as dictionaries and as JSON."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WireError
from router.publisher.engine_events.batch import EngineRemoved, EngineStored
from router.publisher.engine_events.decoder import DecodeLimits, unknown_field
from router.publisher.engine_events.trtllm import decode_trtllm_events
from support.engines.engine_messages import U64, plain


def event(event_id, kind, *, window_size=64, rank=None, **data):
    envelope = {"event_id": event_id, "data": {"type": kind, **data}, "window_size": window_size}
    return envelope if rank is None else {**envelope, "attention_dp_rank": rank}


def block(block_hash, tokens, **fields):
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    fields = {"cache_level": 0, "priority": 35, **fields}
    return {"type": "stored_block", "block_hash": block_hash, "tokens": unique, **fields}


def stored(event_id, *blocks, parent=None, **fields):
    return event(event_id, "stored", parent_hash=parent, blocks=list(blocks), **fields)


CREATED = event(0, "created", num_blocks_per_cache_level=[100, 50])
STORED = stored(1, block(11, [1, 2, 3, 4]), block(-22, [5, 6, 7, 8]), parent=7)
LEVELS = {
    "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
    "priority": {"type": "event_diff", "new_value": 10, "old_value": 35},
}


def only_batch(*events, **options):
    """The one batch that dictionaries make, which JSON of them makes as well."""
    answers = [
        decode_trtllm_events(form, **options)
        for form in (list(events), msgspec.json.encode(events))
    ]
    (batch,), (from_json,) = (answer.batches for answer in answers)
    assert [plain(e) for e in batch.events] == [plain(e) for e in from_json.events]
    assert answers[0].malformed == answers[1].malformed == []
    return batch


def test_stored_blocks():
    batch = only_batch(CREATED, STORED)
    (read,) = batch.events
    assert (batch.first_event_id, batch.last_event_id, batch.dp_rank) == (0, 1, None)
    assert read.block_hashes.tolist() == [11, U64 - 22]
    assert read.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (read.parent, read.block_size, read.medium, read.group) == (7, 4, "GPU", 0)
    assert read.extra_keys is None


def test_blocks_that_differ_become_events_of_their_own_chained():
    blocks = [block(1, [1, 2]), block(2, [3, 4], cache_level=1), block(3, [5])]
    first, second, third = only_batch(stored(0, *blocks)).events
    assert [e.parent for e in (first, second, third)] == [None, 1, 2]
    assert [e.medium for e in (first, second, third)] == ["GPU", "CPU", "GPU"]
    assert [e.block_size for e in (first, second, third)] == [2, 2, 1]


def test_extra_keys_lora_and_salt_distinguish_equal_tokens():
    image = [{"type": "mm_key", "hash": "9f" * 32, "start_offset": 1}]
    virtual = block(2, [3, 4])
    virtual["tokens"][1]["token_extra_id"] = 9
    (read,) = only_batch(stored(0, block(1, [1, 2], mm_keys=image), virtual)).events
    assert read.extra_keys == ((["9f" * 32, 1],), (["token_extra_ids", 0, 9],))
    (read,) = only_batch(stored(0, block(1, [1, 2], lora_id=3, cache_salt="s"))).events
    assert (read.lora_id, read.cache_salt) == (3, "s")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({**STORED, "layer_group_id": 0}, "layer_group_id"),
        (stored(0, block(1, [1, 2]), lora_name="ad"), "lora_name"),
        (stored(0, block(1, [1, 2]), block(2, [3, 4], tenant="a")), "tenant"),
        (event(0, "removed", block_hashes=[1], layers=[0]), "layers"),
        (stored(0, block(1, [1, 2], tenant=None), lora_name=None), None),
        ({**STORED, "hash_algo": "v2_sha256", "layer_group_id": None}, None),
        (event(0, "updated", block_hash=11, **LEVELS), None),
        (CREATED, None),
    ],
)
def test_unknown_field_that_is_not_null_is_named(changed, field):
    sentence = None if field is None else unknown_field(f"the field `{field}`")
    assert only_batch(changed).unknown_field == sentence


def test_events_of_several_windows_are_those_of_a_hybrid_model():
    assert not only_batch(CREATED, STORED).has_full_only
    assert only_batch(event(0, "created", window_size=4096), STORED).has_full_only


def test_a_removed_block_is_gone_from_every_level():
    removed = only_batch(event(5, "removed", block_hashes=[11, -22])).events
    assert all(isinstance(e, EngineRemoved) for e in removed)
    assert [e.medium for e in removed] == ["GPU", "CPU"]
    assert [e.block_hashes.tolist() for e in removed] == [[11, U64 - 22]] * 2
    (from_one,) = only_batch(event(5, "removed", block_hashes=[11], cache_level=1)).events
    assert from_one.medium == "CPU"


def test_an_updated_block_has_moved():
    arrived, left = only_batch(event(5, "updated", block_hash=11, **LEVELS)).events
    assert isinstance(arrived, EngineStored)
    assert (arrived.medium, arrived.block_size, arrived.tokens.tolist()) == ("CPU", 0, [])
    assert (left.medium, left.block_hashes.tolist()) == ("GPU", [11])
    only_priority = {**LEVELS, "cache_level": None}
    assert only_batch(event(5, "updated", block_hash=11, **only_priority)).events == []


def test_blocks_of_all_windows_are_in_one_group():
    events = (stored(0, block(1, [1]), window_size=128), stored(1, block(2, [2]), window_size=8192))
    for each in only_batch(*events).events:
        assert (each.group, each.spec_kind, each.sliding_window_tokens) == (0, None, None)


def test_ranks_and_gaps_part_batches():
    events = [
        event(event_id, "removed", block_hashes=[1], rank=rank)
        for event_id, rank in [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (0, 1)]
    ]
    batches = decode_trtllm_events(events).batches
    assert [(b.dp_rank, b.first_event_id, b.last_event_id) for b in batches] == [
        (0, 1, 2),
        (1, 1, 2),
        (0, 4, 4),
        (1, 0, 0),
    ]


VECTOR = msgspec.json.decode(
    (Path(__file__).parents[3] / "vectors" / "trtllm_events.json").read_bytes()
)
"""Events as TensorRT-LLM's own serializer wrote them (`tests/trtllm/record_kv_events.py`)."""


def test_recorded_life_is_read_in_full():
    batch = only_batch(*VECTOR["cases"]["a life"])
    assert (batch.first_event_id, batch.last_event_id, batch.dp_rank) == (0, 4, None)
    assert (batch.unknown, batch.unknown_field, batch.has_full_only) == ([], None, False)
    first, second, arrived, left, *removed = batch.events
    assert first.block_hashes.tolist() == [U64 - 9, 22]
    assert (first.parent, first.tokens.tolist()) == (None, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (second.parent, second.block_hashes.tolist()) == (22, [33])
    assert (arrived.medium, left.medium, left.block_hashes.tolist()) == ("CPU", "GPU", [33])
    assert [(e.medium, e.block_hashes.tolist()) for e in removed] == [
        ("GPU", [33, 22]),
        ("CPU", [33, 22]),
    ]


def test_recorded_events_of_two_ranks_are_a_batch_each():
    batches = decode_trtllm_events(VECTOR["cases"]["two ranks"]).batches
    assert [(b.dp_rank, b.first_event_id, b.last_event_id) for b in batches] == [
        (0, 0, 1),
        (1, 0, 1),
    ]


def test_recorded_events_of_two_windows_are_those_of_a_hybrid_model():
    assert only_batch(*VECTOR["cases"]["two windows"]).has_full_only


def test_recorded_extra_ids_become_extra_keys():
    (read,) = only_batch(*VECTOR["cases"]["extra ids"]).events
    assert read.extra_keys == ((["token_extra_ids", 7, 7, 7, 7],),)


def test_bad_events_leave_their_neighbours():
    bad = stored(2, block(1, [-1]))
    too_wide = event(3, "removed", block_hashes=[1, 2**64])
    answer = decode_trtllm_events([CREATED, STORED, bad, too_wide, event(4, "pinned"), {"data": 1}])
    (batch,) = answer.batches
    assert len(batch.events) == 1
    assert batch.last_event_id == 4
    assert batch.unknown == ["pinned"]
    assert batch.malformed == [
        "event 2: not what its type promises",
        "event 3: not what its type promises",
    ]
    assert answer.malformed == ["event 5: no event with an id, data and a rank"]


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1", b"\xff", b"[" * 100_000])
def test_non_array_payload_is_refused(answer):
    with pytest.raises(WireError):
        decode_trtllm_events(answer)


def test_limits():
    answer = msgspec.json.encode([CREATED, STORED])
    limits = DecodeLimits(batch_bytes=len(answer), batch_events=2, event_blocks=2)
    assert len(decode_trtllm_events(answer, limits=limits).batches[0].events) == 1
    for narrower in ({"batch_bytes": len(answer) - 1}, {"batch_events": 1}):
        with pytest.raises(WireError, match="allowed"):
            decode_trtllm_events(answer, limits=msgspec.structs.replace(limits, **narrower))
    fewer_blocks = msgspec.structs.replace(limits, event_blocks=1)
    assert len(decode_trtllm_events(answer, limits=fewer_blocks).batches[0].malformed) == 1


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ["event_id", "data", "window_size", "attention_dp_rank"]
DATA_FIELDS = ["type", "blocks", "parent_hash", "block_hashes", "block_hash", "cache_level"]


@st.composite
def changed_events(draw):
    good = draw(st.sampled_from([CREATED, STORED, event(5, "updated", block_hash=11, **LEVELS)]))
    if draw(st.booleans()):
        return {**good, draw(st.sampled_from(FIELDS)): draw(garbage)}
    data = {**good["data"], draw(st.sampled_from(DATA_FIELDS)): draw(garbage)}
    return {**good, "data": data}


@given(st.lists(changed_events() | garbage, max_size=4), st.integers(0, 4))
def test_garbage_anywhere_never_costs_the_good_event_beside_it(events, place):
    events.insert(place, stored(100, block(77, [1, 2, 3, 4])))
    answer = decode_trtllm_events(events)
    read = [e for batch in answer.batches for e in batch.events if isinstance(e, EngineStored)]
    assert any(e.block_hashes.tolist() == [77] and e.tokens.tolist() == [1, 2, 3, 4] for e in read)

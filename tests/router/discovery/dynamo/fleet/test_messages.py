import json

import msgspec
import pytest

from router.discovery.dynamo.fleet.messages import (
    MAX_MESSAGE_BYTES,
    AddRequest,
    Change,
    Envelope,
    decode_envelope,
    decode_events,
    decode_json_event,
    decode_load,
    decode_sequence,
)
from router.errors import WireError
from router.protocol.values import U64_MAX, Rank, Tier
from support.fleets.dynamo_bus import VECTORS, message_of

KV_EVENTS = [row for row in VECTORS if row["subject"].endswith("kv-events")]
LOADS = [row for row in VECTORS if row["subject"].endswith("kv_metrics")]
SEQUENCES = [row for row in VECTORS if row["subject"].endswith("active_sequences_events")]


def truth_of(row):
    decoded = row["decoded"]
    inner = decoded if row["encoding"] == "json" else decoded["payload"]["msgpack"]
    return inner if isinstance(inner, list) else [inner]


def plain(event):
    """An event as the vectors write it, of the fields that are read."""
    data = event.event.data
    if isinstance(data, Change) and data.stored is not None:
        blocks = [(b.block_hash, b.tokens_hash) for b in data.stored.blocks]
        data = ("stored", data.stored.parent_hash, blocks)
    elif isinstance(data, Change):
        data = ("removed", data.removed.block_hashes)
    return (event.worker_id, event.event.event_id, event.event.dp_rank, data)


def plain_truth(event):
    data = event["event"]["data"]
    if "stored" in data:
        stored = data["stored"]
        blocks = [(b["block_hash"], b["tokens_hash"]) for b in stored["blocks"]]
        data = ("stored", stored["parent_hash"], blocks)
    elif "removed" in data:
        data = ("removed", data["removed"]["block_hashes"])
    return (event["worker_id"], event["event"]["event_id"], event["event"]["dp_rank"], data)


def test_every_captured_message_is_of_a_kind_that_is_read_or_passed_over():
    kinds = {row["subject"].rpartition(".")[2] for row in VECTORS}
    passed_over = {"forward-pass-metrics"}
    assert kinds - passed_over == {"kv-events", "kv_metrics", "active_sequences_events"}
    for row in VECTORS:
        if row["encoding"] == "msgpack":
            envelope = decode_envelope(bytes.fromhex(row["payload_hex"]))
            decoded = row["decoded"]
            assert envelope.publisher_id == decoded["publisher_id"]
            assert (envelope.sequence, envelope.topic) == (decoded["sequence"], decoded["topic"])


@pytest.mark.parametrize("row", KV_EVENTS)
def test_every_captured_event_is_what_it_was(row):
    message = message_of(row)
    assert [plain(event) for event in message.events] == [plain_truth(e) for e in truth_of(row)]
    assert message.refusals == []
    assert message.first_event_id == (1 if "1.6.1" in row["source"] else 0)
    assert (message.publisher_id is None) == (row["encoding"] == "json")


@pytest.mark.parametrize("row", LOADS)
def test_every_captured_load_is_what_it_was(row):
    truth = row["decoded"]["payload"]["msgpack"]
    load = decode_load(decode_envelope(bytes.fromhex(row["payload_hex"])))
    assert load.rank == Rank(truth["worker_id"], truth["dp_rank"])
    for field in ("active_decode_blocks", "active_prefill_tokens", "kv_used_blocks"):
        assert getattr(load, field) == truth.get(field)


@pytest.mark.parametrize("row", SEQUENCES)
def test_every_captured_sequence_event_is_what_it_was(row):
    truth = row["decoded"]["payload"]["msgpack"]
    event = decode_sequence(decode_envelope(bytes.fromhex(row["payload_hex"])))
    assert (event.request_id, event.change) == (truth["request_id"], truth["data"])
    assert event.rank == Rank(truth["worker"]["worker_id"], truth["worker"]["dp_rank"])


def sequence(data):
    event = {"request_id": "r", "worker": {"worker_id": 7, "dp_rank": 1}, "data": data}
    return decode_sequence(Envelope(1, 0, "t", msgspec.msgpack.encode(event)))


def test_a_request_added_as_1_0_2_says_it():
    added = {"token_sequence": [5, 6], "isl": 51, "overlap": 3, "expected_output_tokens": None}
    assert sequence({"AddRequest": added}).change == AddRequest([5, 6], 51, 3)


def test_a_request_added_as_1_6_1_says_it():
    hint = {"initial_effective_prefill_tokens": 51, "expected_prefill_duration": None}
    added = {"token_sequence": [5], "track_prefill_tokens": False, "prefill_load_hint": hint}
    change = sequence({"AddRequest": added}).change
    assert change.prefill_load_hint.initial_effective_prefill_tokens == 51
    assert (change.isl, change.track_prefill_tokens) == (None, False)


def event(event_id=1, data=None, **fields):
    data = {"removed": {"block_hashes": [1]}} if data is None else data
    return {"worker_id": 7, "event": {"event_id": event_id, "data": data}, **fields}


def events_of(payload):
    return decode_events(Envelope(1, 0, "kv-events", msgspec.msgpack.encode(payload)))


def test_a_bad_event_falls_alone_and_is_named():
    message = events_of([event(1), event(2, {"moved": {}}), event(3, "cleared")])
    assert [each.event.event_id for each in message.events] == [1, 3]
    assert message.events[1].event.data == "cleared"
    (refusal,) = message.refusals
    assert "event 1" in refusal
    assert "none of `stored`, `removed`, `cleared`" in refusal


@pytest.mark.parametrize("payload", [{"kv_events_v3": []}, "events", {"worker_id": "seven"}])
def test_a_payload_of_another_version_is_refused_in_words(payload):
    with pytest.raises(WireError, match=r"known are Dynamo 1\.0\.2 and 1\.6\.1: run workers of"):
        events_of(payload)


def test_an_array_of_foreign_things_leaves_no_events():
    message = events_of([1, "x"])
    assert message.events == []
    assert len(message.refusals) == 2


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", b"\x93\x01\x02"])
def test_bytes_that_are_no_envelope_are_refused(payload):
    with pytest.raises(WireError, match="event-plane envelope"):
        decode_envelope(payload)


def test_json_that_is_no_router_event_is_refused():
    for payload in (b"", b"[]", b"{}", b'{"worker_id": -1}', b'{"worker_id": 1, "event": 2}'):
        with pytest.raises(WireError, match="RouterEvent in JSON"):
            decode_json_event(payload)


@pytest.mark.parametrize(
    "data",
    [
        {"removed": {"block_hashes": [U64_MAX + 1]}},
        {"stored": {"blocks": [{"block_hash": U64_MAX + 1, "tokens_hash": 1}]}},
        {"stored": {"blocks": [], "parent_hash": U64_MAX + 1}},
    ],
)
def test_integers_of_json_that_are_no_hashes_are_refused(data):
    with pytest.raises(WireError, match="integer above"):
        decode_json_event(json.dumps(event(data=data)).encode())


def test_a_huge_message_is_refused_unread():
    with pytest.raises(WireError, match="at most"):
        decode_json_event(b" " * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({}, Tier.DEVICE),
        ({"storage_tier": "host_pinned"}, Tier.HOST),
        ({"storage_tier": "disk"}, Tier.DISK),
        ({"storage_tier": "external"}, Tier.REMOTE),
        ({"storage_tier": "tape"}, None),
        ({"residency_domain": "cache_owner"}, None),
    ],
)
def test_tiers_are_mapped_from_dynamo(fields, tier):
    assert events_of([event(**fields)]).events[0].tier is tier

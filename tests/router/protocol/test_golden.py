"""The bytes on the bus: what is written today is what was written yesterday, and is read back."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WireError
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.catalogue import (
    RouterAnnouncement,
    WorkerAnnouncement,
    WorkerOrder,
    decode_order,
    decode_router,
    decode_worker,
    encode_entry,
    order_key,
    router_key,
    worker_key,
)
from router.protocol.events import (
    Checkpoint,
    Cleared,
    EventBatch,
    Removed,
    Stored,
    TierBlocks,
    decode_log_message,
    encode_log_message,
    pack_batch,
    pack_state,
)
from router.protocol.loads import (
    Beacon,
    LoadConstants,
    LoadCounters,
    LoadGauges,
    LoadReport,
    PolledLoad,
    TimedWork,
    decode_any_report,
    decode_beacon,
    decode_load_report,
    encode_beacon,
    encode_load_report,
)
from router.protocol.replicas import (
    Frame,
    OutputBlockAdded,
    PrefillCompleted,
    Progress,
    ProgressTold,
    PromptUsage,
    ReservationFreed,
    SharedReservation,
    SnapshotPart,
    SnapshotWanted,
    decode_replica_message,
    encode_replica_message,
)
from router.protocol.values import (
    SCHEME,
    HeldState,
    Identity,
    Rank,
    Tier,
    pack_hashes,
    unpack_hashes,
)

PACKED = pack_hashes(np.array([1, 2**64 - 1], dtype=np.uint64))
STATE = HeldState((1, 0, 0, 0), (2, 0, 0, 0), (2**64 - 1, 0, 0, 0), 5)
IDENTITY = Identity(SCHEME, 16)

EVENTS = (
    Stored(Tier.DEVICE, PACKED), Removed(Tier.HOST, PACKED[:8]), Cleared(), Cleared(Tier.DISK),
)  # fmt: skip
BATCH = EventBatch(7, 1, 99, IDENTITY, 5, 8, pack_batch(STATE, EVENTS))
CHECKPOINT = Checkpoint(7, 1, 99, IDENTITY, 5, 0, 1, (TierBlocks(Tier.REMOTE, PACKED),), STATE)
REPORT = LoadReport(
    worker_id=7, dp_rank=1, agent_incarnation=98, incarnation=99, report_id=6, event_id=5,
    state=STATE,    waiting_s=0.5, heard={3: 4},
    counters=LoadCounters(1, 2.5, 3, 4.5, 5, 6, 7, 8, 9), gauges=LoadGauges(1, 2, 3, 4),
    constants=LoadConstants(5, 6, 7),
)  # fmt: skip
WORKER = WorkerAnnouncement(
    worker_id=7, name="pod-7", endpoint="http://w7:8000", identity=IDENTITY, total_kv_blocks=100,
    max_num_batched_tokens=2048, data_parallel_size=2, incarnation=99,
    block_addresses={0: ["tcp://w7:9"]}, blocksets={0: {"epoch": 99}},
)  # fmt: skip
BEACON = Beacon(3, 4)
ROUTER = RouterAnnouncement(router_id=3, name="r", endpoint="http://r:8092", incarnation=4)
SHARED = SharedReservation("id", Rank(7, 1), PACKED, 1, 40, 16, 16, Progress(True, 2, 0.5))
FRAME = Frame(3, 4, 5, (SHARED,), (("x", Progress()),), ("y",), 6, 2**64 - 1)
PART = SnapshotPart(3, 4, 5, 0, 2, (SHARED,))

NOTHING_HEX = "0000000000000000"
STATE_HEX = "949401000000940200000094cfffffffffffffffff00000005"
IDENTITY_HEX = "93ac787868332d36342d3133333710c2"
HEAD_HEX = f"070163{IDENTITY_HEX}05"


def test_batch_has_golden_bytes():
    assert encode_log_message(BATCH).hex() == (
        f"99a56261746368{HEAD_HEX}08c4a0"
        "0100000000000000" + 3 * NOTHING_HEX + "0200000000000000" + 3 * NOTHING_HEX
        + "ffffffffffffffff" + 3 * NOTHING_HEX + "0500000000000000"
        + "0100000002000000" + "0100000000000000" + "ffffffffffffffff"
        + "0201000001000000" + "0100000000000000"
        + "03ff000000000000" + "0302000000000000" + "c0"
    )  # fmt: skip


def test_a_batch_can_be_read_event_by_event():
    assert BATCH.events == EVENTS
    assert BATCH.state == STATE


def word(kind, tier, blocks, zero=0):
    return kind | tier << 8 | zero << 16 | blocks << 32


MALFORMED = [
    [],
    [word(1, 0, 1)],
    [word(1, 0, 0), word(1, 0, 2), 5],
    [word(4, 0, 0)],
    [word(0, 0, 0)],
    [word(1, 8, 0)],
    [word(2, 255, 0)],
    [word(3, 8, 0)],
    [word(3, 0, 1), 5],
    [word(1, 0, 0, zero=1)],
    [word(1, 0, 2**32 - 1), 5],
]


def malformed_batches():
    """Batches that decode, and whose events are none."""
    for words in MALFORMED:
        packed = pack_state(STATE) + pack_hashes(np.array(words, dtype=np.uint64))
        yield EventBatch(7, 1, 99, IDENTITY, 5, 4 + max(len(words), 1), packed)
    one = pack_batch(STATE, EVENTS[:1])
    yield EventBatch(7, 1, 99, IDENTITY, 5, 6, one)
    yield EventBatch(7, 1, 99, IDENTITY, 5, 5, one + b"\0")
    yield EventBatch(7, 1, 99, IDENTITY, 5, 5, one[:-8])
    yield EventBatch(7, 1, 99, IDENTITY, 5, 3, one)


@pytest.mark.parametrize("batch", list(malformed_batches()))
def test_malformed_events_are_one_error(batch):
    with pytest.raises(WireError):
        assert batch.events == ()
    tree = RadixTree(1024, sub_bits=1)
    tree.store(Rank(7, 1), Tier.DEVICE, unpack_hashes(PACKED))
    before = tree.summary(Rank(7, 1))
    with pytest.raises(WireError):
        tree.apply(Rank(7, 1), batch, 0, 512)
    assert tree.summary(Rank(7, 1)) == before
    tree.check_invariants()


def test_checkpoint_has_golden_bytes():
    assert encode_log_message(CHECKPOINT).hex() == (
        f"9caa636865636b706f696e74{HEAD_HEX}0001"
        "919203c4100100000000000000ffffffffffffffff"
        f"{STATE_HEX}c090"
    )


def test_load_report_has_golden_bytes():
    encoded = encode_load_report(REPORT)
    assert msgspec.msgpack.decode(encoded) == {
        "worker_id": 7, "dp_rank": 1, "agent_incarnation": 98, "incarnation": 99, "report_id": 6,
        "event_id": 5, "waiting_s": 0.5, "heard": {3: 4},
        "state": [[1, 0, 0, 0], [2, 0, 0, 0], [2**64 - 1, 0, 0, 0], 5],
        "counters": {
            "steps": 1, "busy_s": 2.5, "prefill_tokens": 3, "prefill_token_contexts": 4.5,
            "decode_requests": 5, "resident_kv_tokens": 6, "requests_received": 7,
            "requests_finished": 8, "cached_tokens": 9,
        },
        "gauges": {
            "running_requests": 1, "waiting_requests": 2, "waiting_uncached_tokens": 3,
            "kv_used_blocks": 4,
        },
        "constants": {"chunk_tokens": 5, "max_running_requests": 6, "num_blocks": 7},
        "timed": None,
    }  # fmt: skip
    assert encoded[:13].hex() == "8da9776f726b65725f696407a7"


def test_polled_load_is_told_from_a_report_by_its_bytes():
    timed = (TimedWork(LoadCounters(steps=1, busy_s=2.5), 0.1),)
    polled = PolledLoad(
        worker_id=7, dp_rank=1, source_id=8, life_id=9, timed=timed, gauges=LoadGauges(1, 2, 3, 4)
    )
    encoded = encode_load_report(polled)
    assert encoded[:5].hex() == "9807010809"
    assert decode_any_report(encoded) == polled
    assert decode_any_report(encode_load_report(REPORT)) == REPORT
    with pytest.raises(WireError):
        decode_load_report(encoded)
    assert polled.rank == REPORT.rank


def test_worker_announcement_has_golden_bytes():
    assert encode_entry(WORKER) == (
        b'{"worker_id":7,"name":"pod-7","model_name":"default","routing_group":"default",'
        b'"endpoint":"http://w7:8000","identity":["xxh3-64-1337",16,false],"total_kv_blocks":100,'
        b'"max_num_batched_tokens":2048,"data_parallel_start_rank":0,"data_parallel_size":2,'
        b'"role":"aggregated","incarnation":99,"agent_is_engine":true,"labels":{},'
        b'"block_addresses":{"0":["tcp://w7:9"]},"blocksets":{"0":{"epoch":99}}}'
    )
    assert WORKER.ranks == (Rank(7, 0), Rank(7, 1))


def test_router_announcement_and_order_have_golden_bytes():
    assert encode_entry(ROUTER) == (
        b'{"router_id":3,"name":"r","endpoint":"http://r:8092","incarnation":4}'
    )
    assert encode_entry(WorkerOrder("draining")) == b'{"lifecycle":"draining"}'
    assert (worker_key(7), router_key(3), order_key(7)) == ("worker.7", "router.3", "order.7")


def test_beacon_has_golden_bytes():
    assert encode_beacon(BEACON).hex() == "920304"


def test_replica_messages_have_golden_bytes():
    shared = "98a26964920701c4100100000000000000ffffffffffffffff0128101093c302cb3fe0000000000000"
    assert encode_replica_message(FRAME).hex() == (
        f"99a56672616d6503040591{shared}9192a17893c200c091a17906cfffffffffffffffff"
    )
    assert encode_replica_message(PART).hex() == f"97a8736e617073686f74030405000291{shared}"
    wanted = encode_replica_message(SnapshotWanted(9))
    assert wanted.hex() == "92af736e617073686f745f77616e74656409"
    reported = [PrefillCompleted(), OutputBlockAdded(0.5), ReservationFreed(PromptUsage(10, 4))]
    encoded = [encode_replica_message(ProgressTold("id", each)).hex() for each in reported]
    head = "93a4746f6c64a26964"
    assert encoded == [
        f"{head}93b170726566696c6c5f636f6d706c65746564c0c2",
        f"{head}93ac6f75747075745f626c6f636bcb3fe0000000000000c2",
        f"{head}92a56672656564940a04c3c0",
    ]
    assert decode_replica_message(bytes.fromhex(f"{head}91a56672656564")) == ProgressTold(
        "id", ReservationFreed()
    )  # in the form of versions without usage


@pytest.mark.parametrize(
    ("position", "value"),
    [(1, -1), (4, [["id"]]), (5, [["", [True, 0, None]]]), (5, [["x", [True, 1 << 40, None]]]),
     (5, [["x", [True, 0, 1.5]]]), (4, [["id", [7, 1], b"1234567", 1, 40, 16, 16]]), (6, [""])],
)  # fmt: skip
def test_malformed_replica_messages_raise_one_error(position, value):
    fields = msgspec.msgpack.decode(encode_replica_message(FRAME))
    fields[position] = value
    with pytest.raises(WireError):
        decode_replica_message(msgspec.msgpack.encode(fields))


def test_a_part_beyond_the_last_is_no_part():
    fields = msgspec.msgpack.decode(encode_replica_message(PART))
    with pytest.raises(WireError):
        decode_replica_message(msgspec.msgpack.encode([*fields[:4], 2, *fields[5:]]))


@pytest.mark.parametrize(
    ("decode", "encoded", "value"),
    [
        (decode_log_message, encode_log_message(BATCH), BATCH),
        (decode_log_message, encode_log_message(CHECKPOINT), CHECKPOINT),
        (decode_load_report, encode_load_report(REPORT), REPORT),
        (decode_beacon, encode_beacon(BEACON), BEACON),
        (decode_worker, encode_entry(WORKER), WORKER),
        (decode_router, encode_entry(ROUTER), ROUTER),
        (decode_order, encode_entry(WorkerOrder("cordoned")), WorkerOrder("cordoned")),
        (decode_replica_message, encode_replica_message(FRAME), FRAME),
        (decode_replica_message, encode_replica_message(PART), PART),
    ],
)
def test_messages_are_read_back(decode, encoded, value):
    assert decode(encoded) == value


def test_fields_may_be_appended():
    longer = [*msgspec.msgpack.decode(encode_log_message(BATCH)), "from the future"]
    assert decode_log_message(msgspec.msgpack.encode(longer)) == BATCH


def changed(position, value, message=BATCH):
    fields = msgspec.msgpack.decode(encode_log_message(message))
    fields[position] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xff",
        b"garbage",
        encode_log_message(BATCH)[:-3],
        changed(0, "batches"),
        changed(1, -1),
        changed(2, 70_000),
        changed(4, ["xxh3-64-1337", 0]),
        changed(5, 0),
        changed(6, 0),
        changed(6, -1),
        changed(7, b""),
        changed(7, bytes(96)),
        changed(7, []),
        changed(6, 2, CHECKPOINT),
        changed(7, 0, CHECKPOINT),
    ],
)
def test_foreign_bytes_are_one_error(payload):
    with pytest.raises(WireError):
        decode_log_message(payload)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload):
    for decode in (
        decode_log_message, decode_load_report, decode_worker, decode_replica_message,
    ):  # fmt: skip
        with contextlib.suppress(WireError):
            decode(payload)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_are_packed_little_endian(hashes):
    packed = pack_hashes(np.array(hashes, dtype=np.uint64))
    assert packed == b"".join(h.to_bytes(8, "little") for h in hashes)
    assert unpack_hashes(packed).tolist() == hashes

"""Parsers of what a router reads from the bus, from other routers, from disk and from Dynamo."""

import io
import json
import struct
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from router.core.commands import Apply, ApplyLoad, ApplyPeer, ApplySlice
from router.discovery.dynamo.fleet import snapshot as dynamo_snapshot
from router.discovery.dynamo.fleet.messages import (
    Envelope,
    decode_envelope,
    decode_events,
    decode_forward_pass,
    decode_json_event,
    decode_load,
    decode_sequence,
)
from router.errors import InvalidFieldError, WireError
from router.indexer.base import SnapshotError
from router.indexer.radix_tree.radix_tree import RadixTree
from router.indexer.snapshot import decode_snapshot, encode_snapshot
from router.ingest.data_dir import VERSION, DataDir, Kept
from router.ingest.peer_streams import Kind, RecordReader, decode_greeting, encode_record
from router.protocol.catalogue import (
    RouterAnnouncement,
    WorkerOrder,
    decode_order,
    decode_router,
    decode_worker,
    encode_entry,
)
from router.protocol.dumps import decode_dump
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
)
from router.protocol.loads import (
    Beacon,
    decode_beacon,
    decode_load_report,
    encode_beacon,
    encode_load_report,
)
from router.protocol.ranges import (
    Events,
    InvalidRange,
    RangeRefused,
    RangeRequest,
    TooNew,
    decode_range_answer,
    decode_range_request,
    encode_range_answer,
    encode_range_request,
)
from router.protocol.replicas import (
    Frame,
    HandedOver,
    OutputBlockAdded,
    PeerGreeting,
    PrefillCompleted,
    Progress,
    ProgressTold,
    PromptUsage,
    ReservationFreed,
    SharedReservation,
    SnapshotPart,
    decode_replica_message,
    encode_replica_message,
)
from router.protocol.subjects import rank_of
from router.protocol.values import (
    HeldState,
    Rank,
    Scope,
    StreamPosition,
    Tier,
    pack_hashes,
)
from router.publisher.batch_order.position import SavedPosition
from router.publisher.engine_events.decoder import decode_engine_batch
from router.publisher.errors import FeedStateError, NormalizerStateError
from router.publisher.follower.state import load_feed_state, save_feed_state
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.recording.format import RecordingError, decode_header, decode_lines
from router.recording.replay import Replay
from router.runtime.process.errors import MalformedBodyError
from router.runtime.process.json_bodies import decode_now
from router.tools.recordings.cores import replayed_core
from support.engines.engine_messages import Vllm10Stored, payload
from support.fleets.dynamo_fleets import FollowedFleet
from support.fleets.recordings import RandomLife, small
from support.fuzz.target import Target, scratch_folder
from support.values.builders import World, announcement, report

VECTORS = Path(__file__).parents[2] / "vectors"
IDENTITY = announcement(1).identity
RANK = Rank(1, 0)
_HASHES = np.array([11, 22, 2**64 - 1], np.uint64)
_PACKED = pack_hashes(_HASHES)
_STATE = HeldState((0, 1, 0, 0), (3, 0, 0, 0), (11 ^ 22, 0, 0, 2**64 - 1), 4)
RENEWED_AFTER = 25
"""Inputs after which a core is replaced by a new one."""


def small_tree():
    return RadixTree(1 << 12, sub_bits=2)


# ── The log of events ────────────────────────────────────────────────────────────────────────────


def _log_seeds():
    events = [Stored(Tier.DEVICE, _PACKED), Removed(Tier.HOST, _PACKED[:8]), Cleared(Tier.DISK)]
    packed = pack_batch(_STATE, [*events, Cleared()])
    blocks = (TierBlocks(Tier.DEVICE, _PACKED), TierBlocks(Tier.REMOTE, _PACKED[8:]))
    batch = EventBatch(1, 0, 1, IDENTITY, 1, 4, packed)
    whole = Checkpoint(1, 0, 1, IDENTITY, 0, 0, 1, (), HeldState())
    messages = [
        batch,
        replace(batch, last_event_id=1, packed=pack_batch(_STATE, events[:1])),
        whole,
        replace(whole, incarnation=2, event_id=5, blocks=blocks, state=_STATE),
        replace(whole, incarnation=3, parts=2, blocks=blocks),
    ]
    return [encode_log_message(each) for each in messages]


class LogMessages:
    """The kernel and the reader of packed events agree which are malformed."""

    def __init__(self):
        self._tree, self._inputs = small_tree(), 0

    def __call__(self, data):
        message = decode_log_message(data)
        assert decode_log_message(encode_log_message(message)) == message
        if not isinstance(message, EventBatch):
            return
        self._inputs += 1
        if self._inputs % RENEWED_AFTER == 0:
            self._tree = small_tree()
        assert _is_read(lambda: message.events) == _is_read(
            lambda: self._tree.apply(RANK, message, 0, 1 << 12)
        )
        _ = message.state


def _is_read(read):
    try:
        read()
    except WireError:
        return False
    return True


class CoreMessages:
    """A core takes any message of the log, any load report and any frame of another router."""

    def __init__(self, decode, command):
        self._decode, self._command, self._inputs = decode, command, 0
        self._world = self._renewed()

    def _renewed(self):
        world = World(small_tree)
        world.worker(1)
        world.cache(RANK, [*range(64)])
        world.book("mine", [*range(64)])
        return world

    def __call__(self, data):
        message = self._decode(data)
        self._inputs += 1
        if self._inputs % RENEWED_AFTER == 0:
            self._world = self._renewed()
        core = self._world.core
        core.handle(self._command(message), 1.0)
        while core.handle(ApplySlice(), 0.0)[0]:
            pass
        if self._inputs % 16 == 0:
            self._world.select([*range(64)], 1.0)


# ── Routers among themselves, agents, the catalogue ──────────────────────────────────────────────


def _replica_seeds():
    shared = SharedReservation("r1", RANK, _PACKED, 1, 64, 16, 16, Progress(True, 3, 0.5))
    progress = [PrefillCompleted(PromptUsage(64, 16)), OutputBlockAdded(0.5), ReservationFreed()]
    messages = [
        Frame(2, 1, 1, (shared,), (("r2", Progress()),), ("r3",), 1, 7),
        Frame(2, 1, 1, (), (), (), 0, 0),
        SnapshotPart(2, 1, 1, 0, 1, (shared,)),
        SnapshotPart(2, 1, 1, 1, 2, ()),
        HandedOver(2, (shared, replace(shared, request_id="r9"))),
        *(ProgressTold("mine", each) for each in progress),
    ]
    return [encode_replica_message(each) for each in messages]


def _peer_stream_seeds():
    greeting = PeerGreeting(2, 1, "r2", "default", "xxh3-64-1337")
    records = [encode_record(Kind.FRAME, each) for each in _replica_seeds()]
    first = encode_record(Kind.GREETING, msgspec.msgpack.encode(greeting))
    return [first, first + records[0], b"".join([first, *records])]


def _peer_streams(data):
    """The same records, however the bytes are cut."""
    whole, halves = list(RecordReader().feed(data)), RecordReader()
    middle = len(data) // 2
    assert [*halves.feed(data[:middle]), *halves.feed(data[middle:])] == whole
    for kind, record in whole:
        (decode_greeting if kind is Kind.GREETING else decode_replica_message)(record)


def _replica_messages(data):
    message = decode_replica_message(data)
    assert decode_replica_message(encode_replica_message(message)) == message


def _load_seeds():
    reported = report(1, state=_STATE, heard={3: 4}, report_id=7)
    reports = [encode_load_report(each) for each in (reported, report(1))]
    return [*reports, encode_beacon(Beacon(3, 4))]


def _load_reports(data):
    if data[:1] == b"\x92":
        beacon = decode_beacon(data)
        assert decode_beacon(encode_beacon(beacon)) == beacon
        return
    reported = decode_load_report(data)
    again = decode_load_report(encode_load_report(reported))
    assert encode_load_report(again) == encode_load_report(reported)


def _range_seeds():
    checkpoint = Checkpoint(1, 0, 1, IDENTITY, 0, 0, 1, (TierBlocks(Tier.HOST, _PACKED),), _STATE)
    packed = pack_batch(_STATE, [Stored(Tier.DEVICE, _PACKED), Cleared()])[8 * 13 :]
    answers = [
        Events(1, IDENTITY, 3, 4, packed), checkpoint, TooNew(1, 9, None, 7), InvalidRange(4, 3),
        RangeRefused("no", "code", "field", "reason", "allowed"),
    ]  # fmt: skip
    requests = [RangeRequest(3, 4), RangeRequest()]
    return [*map(encode_range_answer, answers), *map(encode_range_request, requests)]


def _ranges(data):
    if data[:1] >= b"\x80" and data[:1] < b"\x90":
        decode_now(decode_range_request, data)
        return
    answer = decode_range_answer(data)
    if isinstance(answer, Events):
        _ = answer.events


def _catalogue_seeds():
    labels = {"taints": ["t"], "topology_domains": {"zone": "a"}, "lora_names": ["l"]}
    worker = json.loads(encode_entry(announcement(1, block_addresses={0: ["tcp://a:1"]})))
    others = [RouterAnnouncement(router_id=1, name="r", endpoint="tcp://a:1", incarnation=1)]
    others.append(WorkerOrder("cordoned"))
    return [json.dumps({**worker, "labels": labels}).encode(), *map(encode_entry, others)]


def _catalogue(data):
    kinds = (decode_worker, decode_router, decode_order)
    read = [entry for kind in kinds if (entry := _read_or_none(kind, data)) is not None]
    for entry in read:
        kind = kinds[(type(entry) is RouterAnnouncement) + 2 * (type(entry) is WorkerOrder)]
        assert kind(encode_entry(entry)) == entry


def _read_or_none(decode, data):
    try:
        return decode(data)
    except WireError:
        return None


# ── Disk and object store ────────────────────────────────────────────────────────────────────────


def _snapshot_seeds():
    world = World(small_tree)
    world.worker(1)
    world.cache(RANK, [*range(64)])
    position = StreamPosition("2026-01-01T00:00:00", 7)
    slices = list(world.core.dump_slices())
    full = bytes(encode_snapshot(position, world.core.index.rank_states(), slices))
    empty = bytes(encode_snapshot(position, [], []))
    return [full, empty]


def _snapshots(data):
    """A changed snapshot is refused; so is a malformed one with the right checksum."""
    sealed = data
    if len(data) >= 24:
        sealed = data[:16] + xxh3_64_intdigest(data[24:]).to_bytes(8, "little") + data[24:]
    snapshot = decode_snapshot(sealed)
    blocks = sum(each.block_count for each in snapshot.ranks)
    assert 8 * blocks <= len(data)
    for each in snapshot.ranks:
        _ = each.state.held


def _dump_seeds():
    blocks = [{"block_hash": h, "tokens_hash": None, "mm_extra_info": None} for h in (1, 2**64 - 1)]
    data = {"stored": {"parent_hash": None, "start_position": None, "blocks": blocks}}
    event = {
        "worker_id": 1, "storage_tier": "device", "residency_domain": "worker",
        "event": {"event_id": 7, "dp_rank": 0, "data": data},
    }  # fmt: skip
    scope = {"block_size": 16, "events": [event, {**event, "storage_tier": "disk"}]}
    return [json.dumps({"m:g": scope, Scope().model_name: {**scope, "events": []}}).encode()]


class Recordings:
    """A recording is read line by line, and each line is replayed or refused."""

    def __call__(self, data):
        lines = io.BytesIO(data).readlines()
        header = decode_header(lines[0] if lines else b"")
        replay = None
        for number, line in decode_lines(lines[1:]):
            if replay is None:
                replay = Replay(_core_of(header))
            replay.take(number, line)


def _core_of(header):
    return replayed_core(header, {"index_max_blocks": 1024})


def _recording_seeds():
    life = RandomLife(3)
    return [small().recording, life.recording]


class DataDirs:
    """A router starts with whatever is in its folder."""

    def __init__(self):
        self._folder = scratch_folder(self)

    def __call__(self, data):
        folder = self._folder
        for content in (data, _as_kept(data)):
            (folder / "workers.json").write_bytes(content)
            kept = DataDir(folder).load()
            assert isinstance(kept, Kept)
            for path in folder.iterdir():
                path.unlink()


def _as_kept(body):
    head = b'{"version":%d,"checksum":"%b","kept":' % (VERSION, xxh3_64_hexdigest(body).encode())
    return head + body + b"}"


def _data_dir_seeds():
    worker = {"worker_id": 1, "endpoint": "http://a:1", "model_name": "m", "block_size": 16}
    body = json.dumps({"workers": [worker], "orders": {"1": "cordoned"}}).encode()
    return [body, b"{}", _as_kept(body)]


class FeedStates:
    """A saved state is loaded, or refused, also if only the outer checksum is right.

    Under a right inner checksum there is what the same program wrote.
    """

    def __init__(self):
        self._path = scratch_folder(self) / "1.0.state"

    def __call__(self, data):
        self._path.write_bytes(_resealed(data))
        state = load_feed_state(self._path)
        new_normalizer().load(state.normalizer, 0.0)


def _resealed(data):
    """The bytes with the length and the checksum that they should have, after a header."""
    size_bytes = _STATE_HEADER.size
    if len(data) < size_bytes:
        return data
    magic, version, zero, _, _ = _STATE_HEADER.unpack_from(data)
    body = data[size_bytes:]
    return _STATE_HEADER.pack(magic, version, zero, len(body), xxh3_64_intdigest(body)) + body


_STATE_HEADER = struct.Struct("<4sHHQQ")


def new_normalizer():
    return Normalizer(EventJournal(RANK, 1, IDENTITY), IDENTITY)


def _state_seeds():
    normalizer = new_normalizer()
    tokens = [*range(100, 100 + 2 * IDENTITY.block_size)]
    stored = Vllm10Stored([1, 2], None, tokens, IDENTITY.block_size, None, "GPU")
    batch = decode_engine_batch(payload(stored))
    normalizer.apply(batch, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        save_feed_state(path, SavedPosition(7, b"last"), normalizer.save())
        return [path.read_bytes()]


# ── Dynamo ───────────────────────────────────────────────────────────────────────────────────────


def _dynamo_seeds(is_json):
    recorded = json.loads((VECTORS / "dynamo_bus.json").read_text("utf-8"))
    return [
        bytes.fromhex(each["payload_hex"])
        for each in recorded
        if (each["encoding"] == "json") is is_json
    ]


def _payload_seeds():
    seeds = [decode_envelope(each).payload for each in _dynamo_seeds(is_json=False)]
    events = [msgspec.msgpack.decode(each) for each in seeds]
    passes = {"worker_id": "18446744073709551615", "version": 1}
    added = {"AddRequest": {"token_sequence": [1, 2**64 - 1], "isl": 64, "overlap": 1}}
    worker = {"worker_id": 7, "dp_rank": 0}
    sequences = [
        {"request_id": "r", "worker": worker, "data": data, "router_id": 3}
        for data in (added, "Free", "MarkPrefillCompleted")
    ]
    more = [passes, *sequences, events[:3], [events[0], {"worker_id": -1}]]
    return [*seeds, *map(msgspec.msgpack.encode, more)]


def _dynamo_envelopes(data):
    envelope = decode_envelope(data)
    for decode in (decode_load, decode_sequence, decode_forward_pass):
        _read_or_none(decode, envelope)


class DynamoPayloads:
    """A fleet takes the events that are read, and its core their effect."""

    def __init__(self, decode):
        self._decode = decode
        self._followed, self._inputs = FollowedFleet(), 0

    def __call__(self, data):
        message = self._decode(data)
        self._inputs += 1
        if self._inputs % RENEWED_AFTER == 0:
            self._followed = FollowedFleet()
        self._followed.fleet.take_events(message, 0.0)
        self._followed.tell()


def _enveloped(data):
    envelope = Envelope(1, 0, "kv-events", data)
    for decode in (decode_sequence, decode_forward_pass):
        _read_or_none(decode, envelope)
    return decode_events(envelope)


class DynamoLoads:
    """A fleet takes the loads that are read."""

    def __init__(self):
        self._followed, self._inputs = FollowedFleet(), 0

    def __call__(self, data):
        load = decode_load(Envelope(1, 0, "kv_metrics", data))
        self._inputs += 1
        if self._inputs % RENEWED_AFTER == 0:
            self._followed = FollowedFleet()
        self._followed.fleet.take_load(load, 0.0, may_appear=True)
        self._followed.tell()


class DynamoDumps:
    """A fleet restores the events of a dump."""

    def __call__(self, data):
        events = dynamo_snapshot.decode_dump(memoryview(data))
        assert 33 * len(events) <= len(data)
        followed = FollowedFleet()
        followed.fleet.restore(events, 0.0)
        followed.tell()


def _dump_of_dynamo():
    recorded = json.loads((VECTORS / "dynamo_radix_state.json").read_text("utf-8"))
    return [bytes.fromhex(recorded["payload_hex"]), bytes(8)]


def _subjects(data):
    rank = rank_of(data.decode("latin-1"))
    assert 0 <= rank.worker_id < 2**64
    assert 0 <= rank.dp_rank < 2**16


def _core(decode, command):
    return lambda: CoreMessages(decode, command)


WIRE = (WireError,)
TARGETS = [
    Target("log_messages", LogMessages, _log_seeds, WIRE, "msgpack"),
    Target("log_in_core", _core(decode_log_message, Apply), _log_seeds, WIRE, "msgpack"),
    Target("loads", lambda: _load_reports, _load_seeds, WIRE, "msgpack"),
    Target("loads_in_core", _core(decode_load_report, ApplyLoad), _load_seeds, WIRE, "msgpack"),
    Target("replicas", lambda: _replica_messages, _replica_seeds, WIRE, "msgpack"),
    Target("peer_streams", lambda: _peer_streams, _peer_stream_seeds, WIRE),
    Target(
        "replicas_in_core", _core(decode_replica_message, ApplyPeer), _replica_seeds, WIRE,
        "msgpack",
    ),
    Target(
        "ranges", lambda: _ranges, _range_seeds, (WireError, InvalidFieldError, MalformedBodyError),
        "msgpack",
    ),
    Target("catalogue", lambda: _catalogue, _catalogue_seeds, (), "json"),
    Target("subjects", lambda: _subjects, lambda: [b"kv.ns.events.1.0", b"kv.ns.load.7.3"], WIRE),
    Target("snapshots", lambda: _snapshots, _snapshot_seeds, (SnapshotError,)),
    Target("dumps", lambda: decode_dump, _dump_seeds, WIRE, "json"),
    Target("recordings", Recordings, _recording_seeds, (RecordingError,)),
    Target("feed_states", FeedStates, _state_seeds, (FeedStateError, NormalizerStateError)),
    Target("data_dirs", DataDirs, _data_dir_seeds, (), "json"),
    Target(
        "dynamo_json", lambda: DynamoPayloads(decode_json_event),
        lambda: _dynamo_seeds(is_json=True), WIRE, "json",
    ),
    Target(
        "dynamo_envelopes", lambda: _dynamo_envelopes, lambda: _dynamo_seeds(is_json=False), WIRE,
        "msgpack",
    ),
    Target("dynamo_events", lambda: DynamoPayloads(_enveloped), _payload_seeds, WIRE, "msgpack"),
    Target("dynamo_loads", DynamoLoads, _payload_seeds, WIRE, "msgpack"),
    Target("dynamo_dumps", DynamoDumps, _dump_of_dynamo, WIRE),
]  # fmt: skip

"""Parsers of what engines say: events, load reports, metrics."""

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from router.errors import WireError
from router.protocol.loads import LoadReport, decode_load_report, encode_load_report
from router.protocol.values import HeldState
from router.publisher.batch_order.frames import parse_live, parse_replayed, replayed_topic
from router.publisher.engine_events._batch_kernel import open_batch, read_batch
from router.publisher.engine_events._event_rows import COLUMNS, TOTALS
from router.publisher.engine_events.batch import EngineStored, StoredRun
from router.publisher.engine_events.decoder import bounded_name, decode_engine_batch
from router.publisher.engine_events.extra_keys import EventKeys, read_extra_keys
from router.publisher.engine_events.slices import sliced
from router.publisher.engine_events.trtllm import decode_trtllm_events
from router.publisher.engine_metrics.loads import EngineLoads, LoadStat
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.runtime.kernels._json_tokens import find_tokens
from support.chaos.token_fuzz import SEEDS as TOKEN_SEEDS
from support.engines.engine_messages import (
    ArrayCleared,
    MapCleared,
    MapRemoved,
    SglangArrayStored,
    SglangStored,
    Vllm10Removed,
    Vllm16Stored,
    Vllm23Stored,
    Vllm33Stored,
    model,
    payload,
    plain,
)
from support.fuzz.guarded import GuardedRegion
from support.fuzz.mutation import MAX_BYTES
from support.fuzz.target import Target

VECTORS = Path(__file__).parents[2] / "vectors"
_TOKENS = list(range(100, 132))


def _event_seeds():
    recorded = json.loads((VECTORS / "engine_events.json").read_text("utf-8"))
    pairs = [[token, token + 1] for token in _TOKENS]
    return [
        *(bytes.fromhex(each["payload_hex"]) for each in recorded),
        payload(
            Vllm16Stored([1, 2], 7, _TOKENS, 16, 3, "GPU", "ad", [["ad", "s"], [["mm", "x", 1]]]),
            Vllm10Removed([1, 2], "GPU"),
            ArrayCleared(),
        ),
        payload(Vllm23Stored([1, 2], 7, _TOKENS, 16, None, "GPU", None, None, 2, "full_attention")),
        payload(
            Vllm33Stored([1, 2], 7, _TOKENS, 16, None, "CPU", None),
            Vllm33Stored([3, 4], 2, _TOKENS, 16, None, "CPU", None),
            MapRemoved([1, 2], "GPU"),
            MapRemoved([3], "GPU"),
            MapCleared(),
        ),
        payload(SglangArrayStored([-1, 2], -7, _TOKENS, 16, None, "GPU", "s", "session", "ad")),
        payload(SglangStored([-1, 2], -7, _TOKENS, 16, None, "DISK", "s", "session", "ad")),
        payload(SglangStored([1, 2], 7, pairs, 16, None)),
        payload(Vllm33Stored([b"h" * 32], b"p" * 32, _TOKENS[:16], 16, None, None, None)),
        msgspec.msgpack.encode([0.0, [{"type": "Foreign", "x": [1, {}]}], None, "later"]),
    ]


def _engine_events(data):
    """A batch is read as its model reads it, and whole it is what it is in slices."""
    batch = decode_engine_batch(data)
    blocks = 0
    for part in batch.parts:
        if isinstance(part, StoredRun | EngineStored):
            whole = part.whole if isinstance(part, StoredRun) else part
            blocks += len(whole.block_hashes)
            count = sum(_blocks(each) for each in sliced(part, whole.block_size or 1, 0))
            assert count == len(whole.block_hashes)
            _read_keys(whole)
    assert blocks <= len(data)
    events = _as_written(data)
    if events is not None:
        expected, unknown, malformed = model(events)
        read = [plain(event) for event in batch.events]
        assert repr(read) == repr(expected)  # NaN differs from itself
        assert batch.unknown == [bounded_name(name) for name in unknown]
        assert len(batch.malformed) == malformed


def _blocks(part):
    return len(part.whole.block_hashes if isinstance(part, StoredRun) else part.block_hashes)


def _read_keys(event):
    if event.extra_keys is not None:
        keys = EventKeys(event.lora_name, event.cache_salt)
        read_extra_keys(event.extra_keys, keys, len(event.block_hashes), is_root=True)


def _as_written(data):
    """The events as msgpack brings them.

    None if their bytes say more than the values, or if arrays mix the fields of two engines.
    """
    try:
        batch = msgspec.msgpack.decode(data)
        is_whole = msgspec.msgpack.encode(batch) == data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, OverflowError):
        return None
    if not is_whole or any(isinstance(each, list) and _is_mixed(each) for each in batch[1]):
        return None
    return batch[1]


def _is_mixed(event):
    return any(isinstance(value, str) for value in event[8:10])


class GuardedEvents:
    """The kernels of events, with every array at the end of its memory."""

    def __init__(self):
        self._payload = GuardedRegion(MAX_BYTES)
        self._tokens = GuardedRegion(4 * MAX_BYTES)
        self._hashes, self._heads = GuardedRegion(8 * MAX_BYTES), GuardedRegion(24 * MAX_BYTES)
        self._rows = GuardedRegion(8 * COLUMNS * 4096)
        self._totals = GuardedRegion(8 * TOTALS)

    def __call__(self, data):
        packed, head = self._payload.holding(data), np.zeros(2, np.uint64)
        count = open_batch(packed, head) if data else -1
        assert count <= len(data)
        if not 0 <= count <= 4096:
            return
        rows = self._rows.array(count * COLUMNS, np.uint64)
        totals = self._totals.array(TOTALS, np.uint64)
        rows[:], totals[:] = 0, 0
        read_batch(
            packed, *head.tolist(), count, 65_536, rows.reshape(count, COLUMNS),
            self._heads.array(3 * count, np.uint64), self._tokens.array(len(data), np.uint32),
            self._hashes.array(len(data), np.uint64), totals,
        )  # fmt: skip


class GuardedTokens:
    """The kernel of token arrays, with every array at the end of its memory."""

    def __init__(self):
        self._body, self._room = GuardedRegion(MAX_BYTES), GuardedRegion(4 * MAX_BYTES)

    def __call__(self, data):
        room = self._room.array(len(data) // 2 + 1, np.uint32)
        count, start, end, _ = find_tokens(self._body.holding(data), room)
        assert count < 0 or (count <= len(room) and 0 <= start < end <= len(data))


def _trtllm_seeds():
    unique = [{"type": "unique_token", "token_id": t, "token_extra_id": t % 2} for t in range(4)]
    block = {"block_hash": -1, "tokens": unique, "cache_level": 0, "lora_id": 2, "cache_salt": "s"}
    keys = {**block, "block_hash": 2**64 - 1, "mm_keys": [{"hash": "a" * 64, "start_offset": 3}]}
    moved = {"type": "updated", "block_hash": 3, "cache_level": {"old_value": 0, "new_value": 1}}
    data = [
        {"type": "created", "num_blocks_per_cache_level": [100, 50]},
        {"type": "stored", "parent_hash": 7, "blocks": [block, keys]},
        {"type": "removed", "block_hashes": [1, 2]},
        moved,
    ]
    events = [{"event_id": i, "data": each, "window_size": 64} for i, each in enumerate(data)]
    events += [{**each, "attention_dp_rank": 1} for each in events]
    return [json.dumps(events).encode(), json.dumps(events[1:2]).encode(), b"[]"]


def _trtllm_events(data):
    answer = decode_trtllm_events(data)
    for batch in answer.batches:
        assert batch.first_event_id <= batch.last_event_id
        for part in batch.parts:
            if isinstance(part, EngineStored):
                _read_keys(part)


def _reported(load):
    """A load report is made of what an engine says, and routers can read it."""
    report = LoadReport(
        worker_id=1, dp_rank=0, agent_incarnation=1, incarnation=1, report_id=1, event_id=0,
        state=HeldState(), counters=load.counters, gauges=load.gauges, constants=load.constants,
    )  # fmt: skip
    assert decode_load_report(encode_load_report(report)) == report


def _sglang_loads(data):
    loads = EngineLoads(0, 16)
    loads.record([b"load", bytes(8), data], 1.0)
    assert loads.garbage + loads.foreign + loads.reports == 1
    _reported(loads.latest(1.0))


def _sglang_seeds():
    full = LoadStat(3, 4, 500, 10_000, 0, 60, 700, 256, 8000, 9_000_000)
    return [msgspec.msgpack.encode(each) for each in (full, LoadStat(0, 0, 0, 0), [*range(20)])]


def _engine_metrics(kind, data):
    metrics = EngineMetrics(kind, data.decode("utf-8", "replace"))
    facts = metrics.facts()
    for dp_rank in (0, 1):
        load = metrics.load(dp_rank, facts)
        if load is not None:
            _reported(load)


def _metrics_seeds(kind):
    prefix = {"vllm": b"vllm:", "sglang": b"sglang:", "trtllm": b"trtllm_"}[kind]
    recorded = (VECTORS / "metrics" / "vllm_0.32.txt").read_bytes().splitlines(keepends=True)
    short = [line for line in recorded if line.startswith(b"vllm:")][:12]
    rest = b'%srunning{engine="0",dp_rank="0",rank="0",mode="decode"} 3.0 1700000000\n' % prefix
    names = {
        "vllm": (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "prompt_tokens_total", "request_success_total", "iteration_tokens_total_count",
            "prefix_cache_hits_total",
        ),
        "sglang": (
            "num_running_reqs", "num_queue_reqs", "token_usage", "realtime_tokens_total",
            "page_size", "num_pages",
        ),
        "trtllm": (
            "num_requests_running", "num_requests_completed_total", "kv_cache_used_blocks",
            "kv_cache_max_blocks", "kv_cache_tokens_per_block", "max_batch_size_static",
            "prompt_tokens_total",
        ),
    }[kind]  # fmt: skip
    lines = b"".join(
        b'%s%s{engine="0",model_name="m\\"\\n",mode="decode"} 3.0 # {} 1\n' % (prefix, n.encode())
        for n in names
    )
    info = b'%scache_config_info{block_size="16",num_gpu_blocks="50",page_size="1"} 1\n' % prefix
    return [b"".join(short), lines + info, rest + lines + lines.replace(b"3.0", b"1e300")]


def _frames(data):
    """Frames of a live message and of a replay: at most one of both forms, and never an error."""
    frames = data.split(b"|")
    for numbered in (parse_live(frames), parse_replayed(frames)):
        assert numbered is None or 0 <= numbered[0] < 2**64
    if len(frames) > 3:
        replayed_topic(frames)


TARGETS = [
    Target("engine_events", lambda: _engine_events, _event_seeds, (WireError,), "msgpack"),
    Target("engine_events_guarded", GuardedEvents, _event_seeds, (), "msgpack"),
    Target("engine_frames", lambda: _frames, lambda: [b"t|12345678|x", b"||12345678|x", b"|a|b"]),
    Target("json_tokens_guarded", GuardedTokens, lambda: [*TOKEN_SEEDS], (), "json"),
    Target("trtllm_events", lambda: _trtllm_events, _trtllm_seeds, (WireError,), "json"),
    Target("sglang_loads", lambda: _sglang_loads, _sglang_seeds, (), "msgpack"),
    *(
        Target(
            f"metrics_{kind}",
            partial(partial, _engine_metrics, kind),
            partial(_metrics_seeds, kind),
            (WireError,),
        )
        for kind in ("vllm", "sglang", "trtllm")
    ),
]

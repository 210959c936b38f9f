"""The smallest inputs of what fuzzing has found, by target; each is refused or read since."""

import json
import re
import struct

import msgspec

from router.protocol.events import Cleared, EventBatch, encode_log_message, pack_batch
from router.protocol.values import SCHEME, HeldState, Identity
from support.fleets.recordings import small

_DIGITS = "9" * 5000
_DEEP = 5000
_NESTED = msgspec.Raw(b"\x91" * _DEEP + b"\xc0")
_NESTED_JSON = b"[" * _DEEP + b"]" * _DEEP
_NO_TEXT = msgspec.Raw(b"\xa1\xff")


def _packed(value):
    return msgspec.msgpack.encode(value)


def _snapshot(name, *more):
    """A snapshot without ranks, whose position has this name."""
    contents = _packed([[name, 7], [], *more])
    padded = contents.ljust(-(-len(contents) // 8) * 8, b"\0")
    return struct.pack("<4sHHQQ", b"KVRX", 2, 0, len(contents), 0) + padded


def _batch(last_event_id):
    batch = EventBatch(1, 0, 1, Identity(SCHEME, 4), 1, 1, pack_batch(HeldState(), [Cleared()]))
    fields = msgspec.msgpack.decode(encode_log_message(batch))
    return _packed([*fields[:6], last_event_id, *fields[7:]])


def _recording(**fields):
    header = {
        "format": "kv-router recording", "version": 2, "product_version": "0", "recorded_at": "",
        "settings": {}, "seed": 1, "multiplier": 3, **fields,
    }  # fmt: skip
    line = {"at_s": 0.0, "entry": {"kind": "tick", "now_s": 1.0}}
    return b"\n".join([msgspec.json.encode(header), json.dumps(line).encode(), b""])


def _with_multiplier(multiplier):
    return re.sub(rb'"multiplier":\d+', b'"multiplier":%d' % multiplier, small().recording)


def _metrics(*lines):
    return "".join(f"{line}\n" for line in lines).encode()


_RUNNING = 'vllm:num_requests_running{engine="0"} '
_BLOCKS = 'vllm:cache_config_info{num_gpu_blocks="%s"} 1'

FINDINGS = [
    ("sglang_loads", "a tag that is no text", _packed([_NO_TEXT, 1, 2, 3, 4])),
    ("sglang_loads", "a nested field", _packed(["LoadStat", *range(10), _NESTED])),
    ("metrics_vllm", "a count above 64 bits", _metrics(_RUNNING + "1e300")),
    (
        "metrics_vllm",
        "an infinite sum",
        _metrics(
            _RUNNING + "1", *[f'vllm:request_success_total{{a="{i}"}} 1e308' for i in range(2)]
        ),
    ),
    (
        "metrics_vllm",
        "an infinite product",
        _metrics(_RUNNING + "1", "vllm:kv_cache_usage_perc 1e308", _BLOCKS % "16"),
    ),
    ("metrics_vllm", "a label of many digits", _metrics(_RUNNING + "1", _BLOCKS % _DIGITS)),
    ("log_messages", "an event id above 63 bits", _batch(2**64 - 1)),
    ("log_in_core", "an event id above 63 bits", _batch(2**64 - 1)),
    ("subjects", "an id of many digits", f"kv.n.load.{_DIGITS}.0".encode()),
    ("subjects", "an id above 64 bits", b"kv.n.load.18446744073709551616.0"),
    ("subjects", "a rank above 65535", b"kv.n.load.1.65536"),
    ("snapshots", "a name that is no text", _snapshot(_NO_TEXT)),
    ("snapshots", "a nested field", _snapshot("n", _NESTED)),
    ("data_dirs", "a nested field", b'{"x":%b}' % _NESTED_JSON),
    ("recordings", "a multiplier of 65 bits", _with_multiplier(2**64 + 1)),
    ("recordings", "a multiplier without an inverse", _with_multiplier(2)),
    ("recordings", "a policy of another version", _recording(settings={"policy": "later"})),
    ("dynamo_events", "a worker of many digits", _packed({"worker_id": _DIGITS})),
    ("streams", "mixed line ends", b"data: [DONE]\r\n\r\n\n"),
    (
        "streams",
        "a name that is no text",
        b'data: {"\xcb":1,"usage":{"prompt_tokens":1},"choices":[{}]}\n\n',
    ),
    (
        "streams",
        "a name in a choice that is no text",
        b'data: {"choices": [{"\xcb": 1, "token_ids": [1]}]}\n\n',
    ),
    (
        "streams",
        "a usage that is no number",
        b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": null}}\n\n',
    ),
    (
        "completions",
        "min_tokens of many digits",
        b'{"prompt":[1],"stream":true,"min_tokens":%b}' % _DIGITS.encode(),
    ),
    ("registrations", "a nested field", b'{"x":%b}' % _NESTED_JSON),
    ("token_files", "a number of many digits", b"a = %b" % _DIGITS.encode()),
    ("tokenizers", "a nested field", b'{"x":%b}' % _NESTED_JSON),
    ("tokenizers", "a token of other types", b'{"bos_token":{"content":"a","lstrip":"b"}}'),
    (
        "responses",
        "a response behind one without a status",
        b"HTTP/1.1 000 X\r\ncontent-length: 5\r\n\r\nhello"
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ),
    ("client_errors", "a code that is a list", b'{"code":[]}'),
    ("peer_handshake", "a tag that is no text", _packed({"type": _NO_TEXT})),
    ("peer_handshake", "a nested field", _packed({"type": "Proof", "x": _NESTED})),
    ("peer_requests", "a nested field", _packed({"x": _NESTED})),
    (
        "peer_replies",
        "a reason that is no text",
        _packed({"type": "PeerRefused", "rule": _NO_TEXT}),
    ),
    ("descriptors", "a nested field", b'{"x":%b}' % _NESTED_JSON),
    ("blocksets", "a nested field", b'{"x":%b}' % _NESTED_JSON),
    ("tier_messages", "a scheme that is no text", _packed([0, 1, [_NO_TEXT, 16, False], 0])),
    ("tier_messages", "a nested field", _packed([2, [], True, _NESTED])),
    (
        "tier_messages",
        "heads out of order",
        _packed([1, 1, [bytes(48), struct.pack("<12Q", 0, 0, 0, 4, 0, 0, 2, 0, 0, 5, 0, 0)]]),
    ),
]

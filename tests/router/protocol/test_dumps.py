"""Dumps: what we write we can read, and what others write does no harm."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from router.errors import WireError
from router.protocol.dumps import ScopeDump, decode_dump, dump_event, scope_key
from router.protocol.values import Scope, Tier
from support.values.builders import rank

VECTORS = Path(__file__).parents[2] / "vectors" / "standalone_indexer_examples.json"
KEY = scope_key(Scope("m", "g"))


def hashes(*values):
    return np.array(values, dtype=np.uint64)


def encoded(*events, block_size=16):
    return msgspec.json.encode({KEY: ScopeDump(block_size, list(events))})


def changed(path, value):
    """A good dump with something else at one place."""
    dump = json.loads(encoded(dump_event(rank(1), Tier.DEVICE, 7, hashes(1))))
    place = dump[KEY]["events"][0]
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    return json.dumps(dump).encode()


def test_dump_is_read_back_by_rank():
    payload = encoded(
        dump_event(rank(1), Tier.DEVICE, 7, hashes(1, 2**64 - 1)),
        dump_event(rank(1), Tier.DISK, 7, hashes(3)),
        dump_event(rank(1, 1), Tier.HOST, 9, hashes(4)),
    )
    first, second = decode_dump(payload)
    assert (first.scope_key, first.block_size, first.rank, first.event_id) == (
        "m:g",
        16,
        rank(1),
        7,
    )
    assert {tier: held.tolist() for tier, held in first.blocks.items()} == {
        Tier.DEVICE: [1, 2**64 - 1],
        Tier.DISK: [3],
    }
    assert (second.rank, second.event_id, list(second.blocks)) == (rank(1, 1), 9, [Tier.HOST])


def test_an_empty_dump_says_nothing():
    assert decode_dump(b"{}") == decode_dump(encoded()) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage",
        b"\xff" * 9,
        b"[]",
        b"[" * 100_000,
        b'{"m:g": {"block_size": 0, "events": []}}',
        changed("storage_tier", "moon"),
        changed("worker_id", -1),
        changed("event.dp_rank", 70_000),
        changed("event.event_id", "x"),
        changed("event.data", "cleared"),
        changed("event.data.stored.blocks.0.block_hash", 2**64),
        changed("event.data.stored.blocks.0.block_hash", -1),
        changed("event.data.stored.blocks.0.tokens_hash", 5),
        encoded(*[dump_event(rank(1), Tier.DEVICE, 7, hashes(1))] * 2),
        encoded(
            dump_event(rank(1), Tier.DEVICE, 7, hashes(1)),
            dump_event(rank(1), Tier.HOST, 8, hashes(1)),
        ),
    ],
)
def test_foreign_bytes_are_a_wire_error(payload):
    with pytest.raises(WireError):
        decode_dump(payload)


def test_a_dump_in_an_engines_own_hashes_is_refused():
    recorded = next(e for e in json.loads(VECTORS.read_text()) if e["path"] == "/dump")
    with pytest.raises(WireError, match="not by sequence hashes"):
        decode_dump(json.dumps(recorded["response"]).encode())

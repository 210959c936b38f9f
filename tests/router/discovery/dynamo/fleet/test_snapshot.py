import json
from pathlib import Path

import msgspec
import pytest

from router.discovery.dynamo.fleet.messages import RouterEvent
from router.discovery.dynamo.fleet.snapshot import decode_dump
from router.errors import WireError

VECTOR = json.loads((Path(__file__).parents[4] / "vectors" / "dynamo_radix_state.json").read_text())
PAYLOAD = bytes.fromhex(VECTOR["payload_hex"])


def test_a_real_dump_says_what_its_router_said():
    truth = msgspec.convert(VECTOR["events"], list[RouterEvent])
    assert decode_dump(memoryview(PAYLOAD)) == truth


def test_multimodal_objects_are_read_over():
    count, head, event = PAYLOAD[:8], PAYLOAD[8:53], PAYLOAD[54:58]
    assert PAYLOAD[53] == 0
    objects = b"".join(n.to_bytes(8, "little") for n in (1, 99, 1, 0, 16))
    changed = (1).to_bytes(8, "little") + head + b"\x01" + objects + event
    assert count == (4).to_bytes(8, "little")
    (decoded,) = decode_dump(memoryview(changed))
    assert decoded == decode_dump(memoryview(PAYLOAD))[0]


@pytest.mark.parametrize("length", [0, 7, 8, 30, len(PAYLOAD) - 1])
def test_a_dump_cut_off_is_refused(length):
    with pytest.raises(WireError):
        decode_dump(memoryview(PAYLOAD[:length]))


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (PAYLOAD + b"\0", "1 bytes too many"),
        (PAYLOAD[:24] + b"\x02" + PAYLOAD[25:], "an event of kind 2"),
        (PAYLOAD[:28] + b"\x07" + PAYLOAD[29:], "neither 0 nor 1"),
        (b"\xff" * 8 + PAYLOAD[8:], "items in"),
        (b"[]", "not a dump"),
    ],
)
def test_invalid_dump_is_refused_with_its_reason(payload, words):
    with pytest.raises(WireError, match=words):
        decode_dump(memoryview(payload))

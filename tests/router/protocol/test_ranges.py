"""The bytes of questions about a rank's events, and of their answers."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WireError
from router.protocol.events import Checkpoint, Cleared, Stored, TierBlocks, pack_batch, pack_state
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
from router.protocol.values import SCHEME, HeldState, Identity, Tier, pack_hashes

STATE = HeldState((1, 0, 0, 0), (2, 0, 0, 0), (2**64 - 1, 0, 0, 0), 5)
IDENTITY = Identity(SCHEME, 16)
HASHES = pack_hashes(np.array([1, 2**64 - 1], dtype=np.uint64))
TOLD = (Stored(Tier.DEVICE, HASHES), Cleared())
PACKED = pack_batch(STATE, TOLD)[len(pack_state(STATE)) :]

EVENTS = Events(99, IDENTITY, 5, 6, PACKED)
CHECKPOINT = Checkpoint(7, 1, 99, IDENTITY, 5, 0, 2, (TierBlocks(Tier.REMOTE, HASHES),), STATE)
TOO_NEW = TooNew(99, 7, None, 6)
INVALID = InvalidRange(7, 6)
REFUSED = RangeRefused(
    "start_event_id: got `str`", "invalid_field", "start_event_id", "got `str`", "`int`"
)

IDENTITY_HEX = "93ac787868332d36342d3133333710c2"


def test_range_requests_have_golden_bytes():
    assert encode_range_request(RangeRequest(7, 9)).hex() == (
        "82ae73746172745f6576656e745f696407ac656e645f6576656e745f696409"
    )
    assert decode_range_request(encode_range_request(RangeRequest(7, 9))) == RangeRequest(7, 9)


@pytest.mark.parametrize("question", [{}, {"start_event_id": None}, {"from_the_future": 1}])
def test_range_request_fields_are_optional(question):
    assert decode_range_request(msgspec.msgpack.encode(question)) == RangeRequest()


@pytest.mark.parametrize(
    "question",
    [7, [1, 2], {"start_event_id": -1}, {"end_event_id": "7"}, {"end_event_id": 1.5}],
)
def test_invalid_range_request_is_refused(question):
    with pytest.raises(msgspec.ValidationError):
        decode_range_request(msgspec.msgpack.encode(question))


def test_events():
    assert encode_range_answer(EVENTS).hex() == (
        f"96a66576656e747363{IDENTITY_HEX}0506c420"
        "0100000002000000" + "0100000000000000" + "ffffffffffffffff" + "03ff000000000000"
    )  # fmt: skip
    assert EVENTS.events == TOLD


def test_checkpoint_is_that_of_the_log():
    assert encode_range_answer(CHECKPOINT).hex().startswith("9caa636865636b706f696e74070163")


def test_no_events():
    assert encode_range_answer(TOO_NEW).hex() == "95a7746f6f5f6e65776307c006"
    assert encode_range_answer(INVALID).hex() == "93ad696e76616c69645f72616e67650706"


def test_refusal():
    assert msgspec.msgpack.decode(encode_range_answer(REFUSED)) == [
        "refused", "start_event_id: got `str`", "invalid_field", "start_event_id", "got `str`",
        "`int`",
    ]  # fmt: skip


@pytest.mark.parametrize("answer", [EVENTS, CHECKPOINT, TOO_NEW, INVALID, REFUSED])
def test_messages_are_read_back(answer):
    assert decode_range_answer(encode_range_answer(answer)) == answer


@pytest.mark.parametrize("packed", [PACKED[:-1], PACKED[:-8], b"", PACKED + PACKED])
def test_malformed_events_are_one_error(packed):
    malformed = msgspec.structs.replace(EVENTS, packed=packed)
    with pytest.raises(WireError):
        assert malformed.events == ()


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload):
    with contextlib.suppress(WireError):
        decode_range_answer(payload)

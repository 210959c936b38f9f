"""Tokens read straight from a body are those that msgspec reads, and the same is refused.

Bodies are of HTTP, in JSON, and of NATS, in JSON and msgpack.
"""

import json
import os

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.api.rpc.codecs import JSON, MSGPACK
from router.api.token_requests import TokenRequests
from router.errors import InvalidFieldError, KvRouterError
from router.protocol.commands import Command
from router.protocol.requests import ReserveRequest, SelectRequest
from router.runtime.kernels._json_tokens import NOT_PLAIN, find_tokens
from router.runtime.process.json_bodies import MOST_NAMES, decode_now
from support.chaos.token_fuzz import MANY, agree, mutated, outcome, strictly

DECODER = TokenRequests(SelectRequest)
EXAMPLES = int(os.environ.get("KV_FUZZ_EXAMPLES", 100))


def tokens_of(body):
    return DECODER.decode(body, []).token_ids


def is_read_straight(body):
    room = np.empty(len(body) // 2 + 1, np.uint32)
    return find_tokens(np.frombuffer(body, np.uint8), room)[0] != NOT_PLAIN


PLAIN = [
    b'{"token_ids":[]}',
    b'{"token_ids":[0]}',
    b'{"token_ids":[4294967295,1,22,333,4444,55555,666666,7777777,88888888,999999999]}',
    b' \t\r\n{ "token_ids" : [ 1 ,\t2\n, 3 ] , "model_name" : "m" } ',
    b'{"routing_constraints":{"required_taints":["token_ids"]},"token_ids":[1]}',
    b'{"x":{"token_ids":[7]},"token_ids":[1]}',
    b'{"x":[{"token_ids":[7]},"]}"],"token_ids":[1]}',
    b'{"cache_salt":"\\"token_ids\\":[7]","token_ids":[1]}',
    b'{"cache_salt":"a\\\\","token_ids":[1]}',
    b'{"token_ids":[1],"cache_salt":"\\u00e9","explain":true,"priority_jump":1.5e0}',
    b'{"lora_name":null,"token_ids":[1]}',
    b'{"token_ids":[1],"request_id":"r1"}',
    b'{"token_ids":[1],"request_id":"r2"}',
    b'{"request_id":"~request id~","token_ids":[1]}',
    b'{"token_ids":[1],"cache_salt":"\\"request_id\\":\\"r8\\"","request_id":"r9"}',
    *(json.dumps({"token_ids": MANY}, indent=indent).encode() for indent in (None, 0, 2)),
]

ODD = [
    b'{"request_id": "r3", "token_ids": [1], "x": "~request id~"}',
    b'{"token_ids":[1],"x":{"request_id":"r4"}}',
    b'{"token_ids":[1],"x":{"request_id":"r5"},"request_id":"~request id~"}',
    b'{"token_ids":[1],"x":{"request_id":"~request id~"},"request_id":"r6"}',
    b'{"token_ids":[1],"x":{"request_id":"r7"},"request_id":"r7"}',
    b"",
    b"[]",
    b"{}",
    b"null",
    b"{",
    b'{"token_ids":[1],"request_id":"r1","request_id":"r2"}',
    b'{"token_ids":[1],"request_id":"r1","request\\u005fid":"r2"}',
    b'{"token_ids":[1],"request_id":["r1"]}',
    b'{"token_ids":[1],"request_id":""}',
    b'{"token_ids',
    b'{"token_ids"',
    b'{"token_ids":',
    b'{"token_ids":[',
    b'{"token_ids":[1',
    b'{"token_ids":[1,',
    b'{"token_ids":[1]',
    b'{"token_ids":[1],',
    b'{"token_ids":null}',
    b'{"token_ids":{}}',
    b'{"token_ids":"1"}',
    b'{"token_ids":1}',
    b'{"token_ids":[-1]}',
    b'{"token_ids":[01]}',
    b'{"token_ids":[00]}',
    b'{"token_ids":[1.0]}',
    b'{"token_ids":[1e2]}',
    b'{"token_ids":[4294967296]}',
    b'{"token_ids":[18446744073709551617]}',
    b'{"token_ids":[99999999999999999999999999]}',
    b'{"token_ids":[1,]}',
    b'{"token_ids":[,1]}',
    b'{"token_ids":[1 2]}',
    b'{"token_ids":[NaN]}',
    b'{"token_ids":[true]}',
    b'{"token_ids":[null]}',
    b'{"token_ids":["1"]}',
    b'{"token_ids":[[1]]}',
    b'{"token_ids":[1],"token_ids":[2]}',
    b'{"token_ids":[1],"token_ids":"x"}',
    b'{"token_ids":[1],"token_\\u0069ds":[2]}',
    b'{"token_\\u0069ds":[2]}',
    b'{"token_ids":[1]}x',
    b'{"token_ids":[1]}}',
    b'{"token_ids":[1]]',
    b'{"token_ids":[1],"model_name":7}',
    b'{"token_ids":[1],"cache_salt":"\xff"}',
    b'{"token_ids":[1],"cache_salt":"\\ud800"}',
    b'{"token_ids":[1],"\xff":1}',
    b'{"a" "b","token_ids":[1]}',
    b'{"a":]},"token_ids":[1]}',
    b'{"a":[},"token_ids":[1]}',
    b'\xef\xbb\xbf{"token_ids":[1]}',
    b'{"token_ids":[1],}',
    b'{,"token_ids":[1]}',
    b"{'token_ids':[1]}",
    b'{"token_ids":[1]\x00}',
    b'{"token_ids":[1\x0b]}',
    b'{"token_ids":[1;2]}',
    b'{"token_ids":[:]}',
    b'{"token_ids":[1/2]}',
]


@pytest.mark.parametrize("body", PLAIN)
def test_plain_tokens_are_read_straight(body):
    assert is_read_straight(body)
    assert tokens_of(body).dtype == np.uint32
    assert tokens_of(body).tolist() == json.loads(body)["token_ids"]
    assert agree(DECODER, body)


@pytest.mark.parametrize("body", ODD)
def test_odd_bodies_are_treated_as_msgspec_treats_them(body):
    assert agree(DECODER, body)


def test_other_fields_are_decoded_beside():
    request = DECODER.decode(
        b'{"model_name":"m","token_ids":[1],"pinned_worker":{"worker_id":3},"foo":1}',
        unknown := [],
    )
    assert (request.model_name, request.pinned_worker.worker_id) == ("m", 3)
    assert unknown == ["foo"]


def test_a_bad_field_beside_tokens_is_named():
    with pytest.raises(InvalidFieldError) as caught:
        DECODER.decode(b'{"token_ids":[1],"allowed_worker_ids":[-1]}', [])
    assert caught.value.field == "allowed_worker_ids[0]"


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_last_token_of_any_length_is_read(cut):
    """Digits are read 8 bytes at a time, where there are as many."""
    for last in (1, 12, 123, 1_234, 12_345, 123_456, 1_234_567, 12_345_678, 4_294_967_295):
        body = b'{"token_ids":[' + b"1," * cut + b"%d]}" % last
        assert tokens_of(body).tolist() == [1] * cut + [last]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_tokens_come_back(tokens):
    assert tokens_of(msgspec.json.encode({"token_ids": tokens})).tolist() == tokens


@given(st.binary(max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=EXAMPLES, deadline=None)
@example(b"", None)
def test_mutated_bodies_are_treated_as_msgspec_treats_them(noise, random):
    body = noise if random is None else mutated(random, noise)
    assert agree(DECODER, body), body


def test_refused_body_differs_from_a_decoded_one():
    """The comparison itself: an error is not an answer."""
    with pytest.raises(KvRouterError):
        decode_now(msgspec.json.Decoder(SelectRequest).decode, b'{"token_ids":[-1]}')
    assert not agree(TokenRequests(ReserveRequest), b'{"token_ids":[1]}', SelectRequest)


@pytest.mark.parametrize(
    "rest",
    [
        b",".join([b'"":1'] * MOST_NAMES),
        b'"z":{%s}' % b",".join([b'"":1'] * MOST_NAMES),
        b'"z":[%s]' % b",".join([b"{}"] * MOST_NAMES),
    ],
)
@pytest.mark.parametrize("tokens", [b"[1]", b'["a"]'])
def test_body_with_too_many_fields_is_refused(tokens, rest):
    with pytest.raises(InvalidFieldError, match="too many fields"):
        TokenRequests(SelectRequest).decode(b'{"token_ids":%s,%s}' % (tokens, rest), [])


def test_bodies_with_known_names_are_still_checked_for_their_own_faults():
    """Unknown fields are cached by names and brackets: values, duplicates and depth are not."""
    reader = TokenRequests(SelectRequest)
    for number in range(3):
        unknown = []
        request = reader.decode(
            b'{"token_ids":[1],"request_id":"r%d","foo":%d}' % (number, number), unknown
        )
        assert (request.request_id, unknown) == (f"r{number}", ["foo"])
    for odd in (
        b'{"token_ids":[1],"request_id":"r4","foo":1,"foo":2}',
        b'{"token_ids":[1],"request_id":"r4","request_id":"r5"}',
        b'{"token_ids":[1],"request_id":"r4","foo":{"a":1,"a":2}}',
        b'{"token_ids":[1],"request_id":"r4","foo":"\xff"}',
        b'{"token_ids":[1],"request_id":4,"foo":1}',
    ):
        with pytest.raises(KvRouterError):
            reader.decode(odd, [])


ENCODE = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
TAGS = [each.__struct_config__.tag for each in Command.__args__]
VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3)
NESTED = st.recursive(VALUES, lambda each: st.lists(each) | st.dictionaries(st.text(), each))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)
IDS = st.text(max_size=8) | st.sampled_from(["r", "i" * 256, "i" * 257])
FIELDS = {
    "token_ids": TOKENS | st.lists(VALUES, max_size=3) | VALUES,
    "tokens": TOKENS,
    "request_id": IDS | VALUES,
    "selection_id": IDS,
    "model_name": st.sampled_from(["m", ""]),
    "explain": VALUES,
    "usage": st.dictionaries(st.sampled_from(["prompt_tokens", "request_id"]), VALUES),
    "worker_id": st.just(1),
    "kv_hint": NESTED,
    "unknown": NESTED,
}


@st.composite
def commands(draw):
    """The fields of a command, in any order."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True))
    method = draw(st.sampled_from(TAGS) | st.text(max_size=3))
    pairs = [("method", method), *((name, draw(FIELDS[name])) for name in names)]
    return dict(draw(st.permutations(pairs)))


@pytest.mark.parametrize("codec", ENCODE, ids=["json", "msgpack"])
@given(fields=commands(), spare=st.binary(max_size=2), at=st.floats(0, 1), cut=st.integers(0, 3))
@settings(max_examples=EXAMPLES, deadline=None)
def test_commands_of_the_bus_are_treated_as_msgspec_treats_them(codec, fields, spare, at, cut):
    """Whole, the second time with names that are known, and with a few bytes changed."""
    body, strict = ENCODE[codec](fields), strictly(codec)
    place = int(at * len(body))
    for each in (body, body, body[:place] + spare + body[place + cut :]):
        assert outcome(codec.decode, each) == outcome(strict, each), each


@given(tokens=TOKENS)
def test_packed_tokens_are_read_straight(tokens):
    fields = {"method": "select_and_reserve", "token_ids": tokens, "request_id": "r"}
    for order in (fields, dict(reversed(fields.items()))):
        command = MSGPACK.decode(msgspec.msgpack.encode(order), [])
        assert isinstance(command.token_ids, np.ndarray)
        assert (command.token_ids.tolist(), command.request_id) == (tokens, "r")


@pytest.mark.parametrize("codec", ENCODE, ids=["json", "msgpack"])
def test_unknown_fields_are_those_of_the_command_with_the_same_names(codec):
    known = {"select": ["usage"], "free": ["token_ids"]}
    for method in ("select", "free", "select"):
        body = {"method": method, "request_id": "r", "usage": None, "token_ids": [1]}
        codec.decode(ENCODE[codec](body), unknown := [])
        assert unknown == known[method]


PACKED_TOKENS = msgspec.msgpack.encode("token_ids")


@pytest.mark.parametrize(
    "tokens",
    [
        b"\x93\x01\xcc\xff\xcd\x01\x00",
        b"\xdc\x00\x01\x05",
        b"\xdd\x00\x00\x00\x01\xcf\x00\x00\x00\x00\x00\x00\x00\x07",
        b"\x92\xd0\x05\xd3\x00\x00\x00\x00\xff\xff\xff\xff",
        b"\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\x91\xff",
        b"\x91\xca\x3f\x80\x00\x00",
        b"\xdd\xff\xff\xff\xff\x01",
        b"\xc4\x04\x01\x00\x00\x00",
        b"\xc0",
        b"",
    ],
)
def test_numbers_of_any_width_are_treated_as_msgspec_treats_them(tokens):
    body = b"\x82" + msgspec.msgpack.encode("method") + msgspec.msgpack.encode("select")
    body += PACKED_TOKENS + tokens
    assert outcome(MSGPACK.decode, body) == outcome(strictly(MSGPACK), body)

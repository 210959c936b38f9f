"""Unknown fields, and fields that are there twice."""

import json
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.protocol.commands import Command
from router.protocol.requests import PrefillCompleteRequest, SelectRequest
from router.runtime.process.json_bodies import MAX_NAMES, KnownFields
from router.runtime.process.msgpack_bodies import PackedFields

SELECT = KnownFields(SelectRequest)


@pytest.mark.parametrize(
    ("body", "unknown"),
    [
        (b"{}", ()),
        (b'{"token_ids":[1],"model_name":"m"}', ()),
        (b'{"token_ids":[1],"foo":1,"bar":{"model_name":1}}', ("bar", "foo")),
        (b' \n{"endpoint":"http://a:1"}', ("endpoint",)),
        (b'{"\\u0066oo":1}', ("foo",)),
        (b'{"foo":' + b"9" * 5000 + b',"x":"::"}', ("foo", "x")),
        (b"null", ()),
        (b"[1]", ()),
    ],
)
def test_unknown_fields_are_named(body, unknown):
    assert SELECT.unknown(body) == unknown


@pytest.mark.parametrize(
    "body",
    [
        b'{"model_name":"a","model_name":"b"}',
        b'{"model_name" : "a" , "model_name" :"b"}',
        b'{"model_name":"a","\\u006dodel_name":"b"}',
        b'{"x":{"model_name":"a","y":0,"model_name":"b"}}',
        b'{"x":[{"model_name":"a","model_name":"b"}]}',
    ],
)
def test_a_field_that_is_there_twice_is_refused(body):
    with pytest.raises(InvalidFieldError) as caught:
        SELECT.unknown(body)
    assert (caught.value.field, caught.value.http_status) == ("model_name", 422)


def test_names_are_bounded():
    body = json.dumps({f"{i:04}" + "x" * 1000: i for i in range(1000)}).encode()
    unknown = SELECT.unknown(body)
    assert len(unknown) == MAX_NAMES
    assert max(map(len, unknown)) == 64


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UnicodeDecodeError):
        SELECT.unknown(b'{"foo":"\xff"}')


def test_a_tagged_union_has_the_fields_of_the_struct_with_the_tag():
    named, packed_fields = KnownFields(Command), PackedFields(Command)
    for method, unknown in (("free", ("token_ids",)), ("select", ("usage",))):
        body = {"method": method, "usage": None, "token_ids": [1], "request_id": "r"}
        assert named.unknown(json.dumps(body).encode()) == unknown
        assert packed_fields.unknown(msgspec.msgpack.encode(body)) == unknown


def test_a_union_has_the_fields_of_its_structs():
    known = KnownFields(PrefillCompleteRequest | None)
    assert known.unknown(b'{"usage":null}') == ()
    assert known.unknown(b'{"used":null}') == ("used",)


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text() | st.lists(st.integers())))
def test_distinct_unknown_fields_are_named_and_never_refused(fields):
    expected = sorted(fields.keys() - set(SelectRequest.__struct_fields__))[:MAX_NAMES]
    assert list(SELECT.unknown(json.dumps(fields).encode())) == expected


class Pairs(list):
    """The fields of a msgpack map, of which some may be there twice."""


def packed(value):
    if isinstance(value, Pairs):
        parts = [packed(each) for pair in value for each in pair]
        return bytes([0x80 | len(value)]) + b"".join(parts)
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
    if isinstance(value, float):
        return b"\xca" + struct.pack(">f", value)
    return msgspec.msgpack.encode(value)


def is_each_once(value):
    if isinstance(value, Pairs):
        return len({name for name, _ in value}) == len(value) and all(
            is_each_once(each) for _, each in value
        )
    return not isinstance(value, list) or all(map(is_each_once, value))


NAMES = st.text("ab", max_size=2)
LEAVES = st.none() | st.booleans() | st.integers(-300, 300) | NAMES | st.floats(width=32)
NESTED = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each, max_size=3) | st.lists(st.tuples(NAMES, each), max_size=3).map(Pairs)
    ),
)


@given(NESTED)
def test_packed_fields_that_are_there_twice_are_refused_at_any_depth(value):
    body, known = packed(Pairs([("kv_hint", value)])), PackedFields(SelectRequest)
    if is_each_once(value):
        assert known.unknown(body) == ()
        return
    with pytest.raises(InvalidFieldError, match="duplicate field"):
        known.unknown(body)

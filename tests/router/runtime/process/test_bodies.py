"""Bodies: whatever is wrong with one says which field, why, and what is allowed."""

import asyncio

import msgspec
import pytest

from router.errors import InvalidFieldError
from router.protocol.requests import ReserveRequest, SelectRequest
from router.runtime.process.errors import BodyTimeoutError, BodyTooLargeError, MalformedBodyError
from router.runtime.process.json_bodies import THREAD_BYTES, decode_body, read_body


async def chunks(*parts):
    for part in parts:
        yield part


async def test_reads_a_body_in_chunks():
    assert await read_body(chunks(b"ab", b"c"), 3, 60.0) == b"abc"


async def test_stops_reading_a_body_that_is_too_large():
    endless = (b"x" * 10 for _ in iter(int, 1))

    async def forever():
        for part in endless:
            yield part

    with pytest.raises(BodyTooLargeError):
        await read_body(forever(), 100, 60.0)


async def test_slow_body_times_out():
    async def stalled():
        yield b"a"
        await asyncio.Event().wait()

    with pytest.raises(BodyTimeoutError):
        await read_body(stalled(), 100, 0.1)


async def decoded(body, body_type=SelectRequest):
    return await decode_body(msgspec.json.Decoder(body_type).decode, body)


@pytest.mark.parametrize(
    ("body", "field", "status"),
    [
        (b'{"token_ids":[1,-1]}', "token_ids[1]", 422),
        (b'{"token_ids":[4294967296]}', "token_ids[0]", 422),
        (b'{"token_ids":[1.5]}', "token_ids[0]", 422),
        (b'{"token_ids":"abc"}', "token_ids", 422),
        (b'{"token_ids":[18446744073709551616]}', "token_ids[0]", 422),
        (b'{"model_name":""}', "model_name", 422),
        (b'{"router_config_override":{"router_temperature":-1}}',
         "router_config_override.router_temperature", 422),
        (b'{"router_config_override":{"overlap_score_weight":1e999}}',
         "router_config_override.overlap_score_weight", 422),
        (b'{"block_mm_infos":[{"mm_objects":[{"mm_hash":18446744073709551616}]}]}',
         "block_mm_infos[0].mm_objects[0]", 422),
        (b"[]", "body", 422),
        (b"7", "body", 422),
    ],
)  # fmt: skip
async def test_names_the_field(body, field, status):
    with pytest.raises(InvalidFieldError) as caught:
        await decoded(body)
    assert (caught.value.field, caught.value.http_status) == (field, status)
    assert caught.value.allowed


async def test_names_a_missing_field():
    with pytest.raises(InvalidFieldError) as caught:
        await decoded(b'{"token_ids":[1]}', ReserveRequest)
    assert (caught.value.field, caught.value.http_status) == ("worker_id", 422)


async def test_says_which_field_is_unknown_where_none_may_be():
    class Strict(msgspec.Struct, forbid_unknown_fields=True):
        recording: bool = False

    with pytest.raises(InvalidFieldError, match=r"^body: unknown field 'to' \(allowed"):
        await decoded(b'{"to":1}', Strict)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model_name":', b'{"token_ids":[NaN]}', b"\xff\xfe", b'{"model_name":"\xff"}',
     b'{"token_ids":[1],}'],
)  # fmt: skip
async def test_non_json_body_is_malformed(body):
    with pytest.raises(MalformedBodyError):
        await decoded(body)


async def test_deep_nesting_is_malformed():
    with pytest.raises((MalformedBodyError, InvalidFieldError)):
        await decoded(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


async def test_long_bodies_are_decoded_alike():
    tokens = list(range(THREAD_BYTES))
    body = msgspec.json.encode({"token_ids": tokens})
    assert (await decoded(body)).token_ids == tokens
    with pytest.raises(MalformedBodyError):
        await decoded(body[:-1])


async def test_unknown_fields_are_passed_over():
    assert (await decoded(b'{"token_ids":[1],"foo":1}')).token_ids == [1]

"""A prompt as packed tokens, the rest as query parameters: the same as all of it in JSON."""

from urllib.parse import urlencode

import numpy as np
import pytest

from router.api.token_requests import text_fields
from router.protocol.requests import SelectRequest
from router.protocol.values import Tier
from router.sequence.hashing.block_hashes import chain, local_block_hashes, token_array
from support.values.builders import rank

PROMPT = list(range(40))
BINARY = {"content-type": "application/octet-stream"}


@pytest.fixture
async def fleet(router, eventually):
    workers = await router.workers(1, 2)
    hashes = chain(local_block_hashes(token_array(PROMPT), 4)).tolist()
    workers[1].journals[rank(2)].stored(Tier.DEVICE, hashes, None)
    await workers[1].deliver()

    async def is_held():
        return (await router.post("/select", {"token_ids": PROMPT})).json()["worker_id"] == 2

    await eventually(is_held)
    return router


async def post(fleet, path, tokens, headers=None, **query):
    content = np.array(tokens, "<u4").tobytes()
    url = f"{path}?{urlencode(query)}"
    return await fleet.client.post(url, content=content, headers={**BINARY, **(headers or {})})


async def test_packed_tokens_are_placed_as_listed_ones(fleet):
    packed = (await post(fleet, "/select", PROMPT)).json()
    listed = (await fleet.post("/select", {"token_ids": PROMPT})).json()
    assert {**packed, "trust": None} == {**listed, "trust": None}
    assert packed["predicted_cached_blocks"] == 9


async def test_packed_tokens_are_scored_as_listed_ones(fleet):
    packed, listed = [
        [{**each, "trust": None} for each in answer.json()["workers"]]
        for answer in (
            await post(fleet, "/overlap_scores", PROMPT),
            await fleet.post("/overlap_scores", {"token_ids": PROMPT}),
        )
    ]
    assert packed == listed
    assert [each["device_blocks"] for each in packed] == [0, 10]


async def test_the_rest_is_in_the_query(fleet):
    answer = await post(fleet, "/select", PROMPT, allowed_worker_ids="[1]", explain="true")
    assert (answer.json()["worker_id"], len(answer.json()["candidates"])) == (1, 1)
    target = '{"worker_id":1,"dp_rank":0}'
    assert (await post(fleet, "/select", PROMPT, pinned_worker=target)).json()["worker_id"] == 1
    refused = await post(fleet, "/select", PROMPT, phase="prefill")
    assert refused.json()["removed"][0]["filter"] == "role"
    salted = await post(fleet, "/select", PROMPT, cache_salt="17", unknown="[")
    assert salted.status_code == 400
    salted = await post(fleet, "/select", PROMPT, cache_salt="17", unknown="[]")
    assert salted.json()["overlap_blocks"] == 0


async def test_a_booking_finds_its_id_in_query_or_header(fleet):
    booked = await post(fleet, "/select_and_reserve", PROMPT, request_id="a")
    assert booked.json()["request_id"] == "a"
    header = {"x-request-id": "b"}
    assert (await post(fleet, "/select_and_reserve", PROMPT, header)).json()["request_id"] == "b"
    reserved = await post(fleet, "/reservations", PROMPT, worker_id=1, request_id="c")
    assert (reserved.status_code, reserved.json()["worker_id"]) == (201, 1)


async def test_long_ones_are_placed_alike(fleet):
    tokens = PROMPT + [5] * 200_000
    answer = await post(fleet, "/select", tokens)
    assert (answer.json()["overlap_blocks"], answer.json()["isl_tokens"]) == (10, 200_040)


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ({"token_ids": "[1]"}, 400, "token_ids"),
        ({"explain": "yes"}, 400, "explain"),
        ({"explain": "1"}, 422, "explain"),
        ({"allowed_worker_ids": "[-1]"}, 422, "allowed_worker_ids[0]"),
        ({"model_name": ""}, 422, "model_name"),
    ],
)
async def test_a_bad_parameter_is_named(router, query, status, field):
    answer = await post(router, "/select", PROMPT, **query)
    assert (answer.status_code, answer.json()["field"]) == (status, field)


async def test_repeated_parameter_is_refused(router):
    answer = await router.client.post("/select?explain=true&explain=false", headers=BINARY)
    assert (answer.status_code, answer.json()["field"]) == (400, "explain")


@pytest.mark.parametrize("content", [b"123", b"12345"])
async def test_half_a_token_is_refused(router, content):
    answer = await router.client.post("/select", content=content, headers=BINARY)
    assert (answer.status_code, answer.json()["field"]) == (400, "body")


async def test_a_query_that_is_no_text_is_refused(router):
    answer = await router.client.post("/select?cache_salt=%FF", headers=BINARY)
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body")


async def test_no_tokens_are_a_prompt_too(fleet):
    assert (await post(fleet, "/select", [])).json()["isl_tokens"] == 0


def test_text_fields_are_those_without_json():
    texts = text_fields(SelectRequest)
    assert {"model_name", "cache_salt", "request_id", "session_id", "phase"} <= texts
    assert not texts & {"token_ids", "explain", "isl_tokens", "pinned_worker"}

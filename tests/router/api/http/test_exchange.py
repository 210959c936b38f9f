"""Ids of requests, in answers and in the log."""

import io
import json
import logging

import pytest

from router.runtime.process.logs import JsonLines

PROMPT = list(range(40))
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def logged():
    """What is logged meanwhile, as objects."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("router")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("path", ["/select", "/potential_loads", "/no_such_route"])
async def test_ids_that_came_are_answered(router, path):
    headers = {"x-request-id": "r-1", "traceparent": TRACEPARENT}
    answer = await router.post(path, {"token_ids": PROMPT}, headers=headers)
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["traceparent"] != TRACEPARENT


async def test_response_without_request_ids_has_none(router):
    answer = await router.post("/select", {"token_ids": PROMPT})
    assert not {"x-request-id", "traceparent"} & set(answer.headers)


async def test_two_traceparent_headers_are_ignored(router):
    twice = [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT.replace("b7", "c7"))]
    answer = await router.client.get("/health", headers=twice)
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers


@pytest.mark.parametrize("path", ["/select", "/potential_loads"])
async def test_lines_about_a_request_have_its_ids(router, logged, path):
    headers = {"x-request-id": "r-1", "traceparent": TRACEPARENT}
    await router.post(path, {"token_ids": [-1]}, headers=headers)
    await router.post(path, {"token_ids": [-1]})
    first, second = [line for line in logged() if line["message"].startswith("refused")]
    assert first["message"].startswith("refused (invalid_field): token_ids[0]")
    assert (first["request_id"], first["trace_id"]) == ("r-1", TRACE)
    assert second["request_id"] != "r-1"
    assert "trace_id" not in second

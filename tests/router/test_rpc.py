"""The same commands over NATS."""

import json

import pytest

from router.publisher.bus import connection

PROMPT = list(range(40))
SUBJECT = "kv.test.router"


@pytest.fixture
async def ask(router, nats_server, eventually):
    await router.worker(1)
    async with connection(nats_server.url, "caller", lambda _: None) as bus:

        async def ask(body, **headers):
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await bus.client.request(SUBJECT, payload, timeout=60, headers=headers or None)
            return json.loads(answer.data)

        yield ask


async def test_the_life_of_a_request(ask, router):
    answer = await ask({"method": "new", "tokens": PROMPT, "request_id": "x"})
    assert answer == {
        "method": "new", "request_id": "x", "worker_id": 1, "dp_rank": 0, "overlap_blocks": 0,
        "predicted_cached_blocks": 0, "endpoint": "http://w1",
    }  # fmt: skip
    answer = await ask({"method": "mark_prefill", "request_id": "x"})
    assert answer == {"method": "prefill_marked", "success": True}
    for success in (True, False):
        answer = await ask({"method": "mark_free", "request_id": "x"})
        assert answer == {"method": "free_marked", "success": success}
    assert await router.metric("kv_router_reservations") == 0


async def test_an_unknown_request_is_not_marked(ask):
    answer = await ask({"method": "mark_prefill", "request_id": "zz"})
    assert answer == {"method": "prefill_marked", "success": False}


async def test_potential_loads(ask):
    answer = await ask({"method": "potential_loads", "tokens": PROMPT, "cache_salt": "t"})
    assert answer["loads"][0]["potential_prefill_tokens"] == 40
    assert (answer["method"], answer["pending_count"]) == ("potential_loads", 0)


async def test_the_request_id_may_be_in_the_header(ask):
    answer = await ask({"method": "new", "tokens": PROMPT}, **{"x-request-id": "h"})
    assert answer["request_id"] == "h"
    answer = await ask({"method": "mark_free"}, **{"x-request-id": "h"})
    assert answer["success"]


async def test_an_unfit_header_is_refused_as_over_http(ask):
    answer = await ask({"method": "new", "tokens": PROMPT}, **{"x-request-id": "h" * 257})
    assert (answer["code"], answer["field"]) == ("invalid_field", "x-request-id")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"method": "new", "tokens": PROMPT}, "missing_request_id", "request_id"),
        ({"method": "mark_free"}, "missing_request_id", "request_id"),
        ({"method": "new", "request_id": "x"}, "invalid_field", "tokens"),
        ({"method": "new", "request_id": "x", "tokens": [-1]}, "invalid_field", "tokens[0]"),
        ({"method": "fly"}, "invalid_field", "method"),
        ({"tokens": PROMPT}, "invalid_field", "method"),
        (b"garbage", "malformed_body", None),
        (b"", "malformed_body", None),
    ],
)
async def test_what_is_wrong_is_named_as_over_http(ask, body, code, field):
    answer = await ask(body)
    assert (answer["method"], answer["code"], answer.get("field")) == ("error", code, field)


async def test_an_unknown_model_has_no_endpoints(ask):
    body = {"method": "new", "tokens": PROMPT, "request_id": "x", "model_name": "zz"}
    assert (await ask(body))["code"] == "no_endpoints"


async def test_commands_are_counted(ask, router):
    await ask({"method": "new", "tokens": PROMPT, "request_id": "x"})
    await ask(b"garbage")
    line = 'kv_router_requests_total{code="%s",interface="nats",route="%s"}'
    assert await router.metric(line % ("ok", "new")) == 1
    assert await router.metric(line % ("malformed_body", "unknown")) == 1

"""Callers over NATS have tokens, scopes, tenants and rates as over HTTP."""

import asyncio

import msgspec
import pytest

from router.client import RouterClient, SelectRequest
from router.runtime.security.errors import ForbiddenError, UnauthenticatedError
from support.processes.running import RunningRouter
from support.processes.servers import eventually

GATEWAY, OPERATOR, ACME, EVIL, SLOW = (f"a-token-of-{name}-1234" for name in "goaes")
TENANTS = "\n".join(
    f'[[tokens]]\nname = "{name}"\ntoken = "{token}"\nscopes = ["route"]\ntenant = "{name}"'
    for name, token in (("acme", ACME), ("evil", EVIL))
)
TOKENS = f"""
[[tokens]]
name = "gateway"
token = "{GATEWAY}"
scopes = ["route"]
[[tokens]]
name = "operator"
token = "{OPERATOR}"
scopes = ["admin", "metrics"]
{TENANTS}
[[tokens]]
name = "slow"
token = "{SLOW}"
scopes = ["route"]
requests_per_s = 0.001
burst_requests = 2
"""
PROMPT = list(range(40))
SALTED = {"token_ids": PROMPT, "cache_salt": "acme"}


class GuardedRouter(RunningRouter):
    """A router whose callers over NATS need tokens."""

    async def ask(self, token, method, *, subject="kv.test.router", **fields):
        return await self.asked(token, {"method": method, **fields}, subject)

    async def asked(self, token, body, subject, encoding=msgspec.json, **headers):
        said = headers | ({} if token is None else {"Authorization": f"Bearer {token}"})
        answer = await self.bus.client.request(
            subject, encoding.encode(body), timeout=60, headers=said or None
        )
        return encoding.decode(answer.data)


@pytest.fixture
async def router(nats_server, bus, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    options = {"token_file": str(path), "router_queue_threshold": 0.5}
    async with GuardedRouter(nats_server.url, **options).running() as router:
        router.bus = bus
        router.client.headers["authorization"] = f"Bearer {OPERATOR}"
        await router.worker(1, max_num_batched_tokens=64)
        yield router


async def test_unauthenticated_requests_get_no_details(router):
    for token in (None, "wrong"):
        answer = await router.ask(token, "select", token_ids=PROMPT)
        assert (answer["method"], answer["code"]) == ("error", "unauthenticated")
    assert (await router.asked(None, b"garbage", "kv.test.router"))["code"] == "unauthenticated"
    twice = {"authorization": f"Bearer {GATEWAY}"}
    body = {"method": "select", "token_ids": PROMPT}
    answer = await router.asked(GATEWAY, body, "kv.test.router", **twice)
    assert answer["error"].startswith("authorization: given twice")


async def test_a_scope_is_not_another(router):
    for token, method in ((GATEWAY, "loads"), (ACME, "loads"), (OPERATOR, "select")):
        answer = await router.ask(token, method, token_ids=PROMPT)
        assert answer["code"] == "forbidden", method
    assert (await router.ask(GATEWAY, "select", token_ids=PROMPT))["worker_id"] == 1
    assert isinstance(await router.ask(OPERATOR, "loads"), list)


async def test_a_tenant_does_not_go_ahead_of_others(router):
    hidden = {"router_config_override": {"track_prefill_tokens": False}}
    for fields in ({"strict_priority": 1}, hidden):
        for method in ("select", "new", "select_and_reserve"):
            answer = await router.ask(ACME, method, **SALTED, **fields)
            assert answer["code"] == "forbidden", method
        assert (await router.ask(GATEWAY, "select", **SALTED, **fields))["worker_id"] == 1
    reserve = await router.ask(ACME, "reserve", worker_id=1, request_id="h", **SALTED, **hidden)
    assert reserve["code"] == "forbidden"


async def statuses(router, token, steps):
    answer = await router.ask(token, "reservations:batch", steps=steps)
    return [each["status"] for each in answer["results"]]


async def test_tenants_have_salts_and_ids_of_their_own(router):
    booked = await router.ask(ACME, "select_and_reserve", request_id="r", **SALTED)
    assert booked["request_id"] == "r"
    for request_id in ("r", "acme/r"):
        for step in ("free", "prefill_complete", "output_block"):
            answer = await router.ask(EVIL, step, request_id=request_id)
            assert (answer["code"], answer["request_id"]) == ("reservation_not_found", request_id)
        stolen = await router.ask(EVIL, "mark_free", request_id=request_id)
        assert stolen["success"] is False
    for method in ("select", "new", "overlap_scores", "potential_loads"):
        assert (await router.ask(EVIL, method, **SALTED))["code"] == "forbidden"
    steps = [{"step": "free", "request_id": "r"}, {"step": "prefill_complete", "request_id": "r"}]
    assert await statuses(router, EVIL, steps) == [404, 404]
    assert await statuses(router, ACME, steps) == [200, 404]


async def test_a_tenant_that_waits_is_answered_under_its_own_id(router):
    await router.ask(ACME, "select_and_reserve", request_id="first", **SALTED)
    second = asyncio.create_task(
        router.ask(ACME, "select_and_reserve", request_id="second", **SALTED)
    )
    core = router.service.host.core
    await eventually(lambda: len(core.waiting) == 1)
    assert (await router.ask(EVIL, "free", request_id="second"))["code"] == "reservation_not_found"
    assert await router.ask(ACME, "free", request_id="first") == {"status": "ok"}
    assert (await second)["request_id"] == "second"


async def test_batches_answer_as_over_http_in_both_encodings(router):
    requests = [{"token_ids": PROMPT}, {"token_ids": [-1]}, "nonsense"]
    for encoding, media_type in ((msgspec.json, "json"), (msgspec.msgpack, "msgpack")):
        said = await router.asked(
            GATEWAY,
            {"method": "select:batch", "requests": requests},
            "kv.test.router",
            encoding,
            **{"Content-Type": f"application/{media_type}"},
        )
        assert [each["status"] for each in said["results"]] == [200, 422, 422]
        assert said["results"][0]["decision"]["worker_id"] == 1


async def test_rates_count_every_item_of_a_batch(router):
    requests = [{"token_ids": PROMPT}] * 3
    said = await router.ask(SLOW, "select:batch", requests=requests)
    assert len(said["results"]) == 3
    answer = await router.ask(SLOW, "select", token_ids=PROMPT)
    assert (answer["code"], answer["limit"]) == ("rate_limited", 0.001)


async def test_index_queries_are_guarded(router):
    async def ask(token, question):
        answer = await router.asked(token, question, "kv.test.indexer.query")
        return answer.get("Error", "answered").partition(":")[0]

    tokens = {"FindMatchesTokens": {"tokens": PROMPT, "cache_salt": "acme"}}
    hashes = {"FindMatchesHashed": {"block_hashes": [1]}}
    assert [await ask(None, each) for each in (tokens, "DumpTree")] == ["authorization"] * 2
    assert [await ask(ACME, each) for each in (tokens, hashes)] == ["answered", "block_hashes"]
    assert await ask(EVIL, tokens) == "cache_salt"
    assert await ask(GATEWAY, hashes) == "answered"
    assert [await ask(each, "DumpTree") for each in (GATEWAY, OPERATOR)] == [
        "authorization",
        "answered",
    ]


async def test_the_client_says_its_token(router, nats_server):
    async with RouterClient.over_nats(nats_server.url, "test", token=GATEWAY) as client:
        async with client.reserve(SelectRequest(token_ids=PROMPT)) as reservation:
            assert reservation.decision.worker_id == 1
            await reservation.prefill_complete()
        with pytest.raises(ForbiddenError):
            await client.loads()
    async with RouterClient.over_nats(nats_server.url, "test") as client:
        with pytest.raises(UnauthenticatedError):
            await client.select(SelectRequest(token_ids=PROMPT))

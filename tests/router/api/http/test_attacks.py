"""Attacks over HTTP that a router withstands, as README.md of `runtime/security` lists them."""

import asyncio
import gzip
import logging

import httpx
import pytest

from router.runtime.process.logs import JsonLines, TextLines
from support.engines.upstreams import Upstream, hangs
from support.fleets.direct import DirectRouter
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port
from support.values.token_files import token_lines, token_of

GATEWAY, OPERATOR, ACME, EVIL, SLOW = map(token_of, ("gateway", "operator", "acme", "evil", "slow"))
TOKENS = "".join(
    (
        token_lines("gateway", "route metrics"),
        token_lines("operator", "admin metrics"),
        token_lines("acme", "route", tenant="acme"),
        token_lines("evil", "route", tenant="evil"),
        token_lines("slow", "route", requests_per_s=0.001, burst_requests=2),
    )
)
PROMPT = list(range(40))


class GuardedRouter(DirectRouter):
    """A router whose callers need tokens, with a worker."""

    def as_(self, token):
        return {} if token is None else {"authorization": f"Bearer {token}"}

    async def ask(self, token, path, body, **headers):
        return await self.post(path, body, headers={**self.as_(token), **headers})

    async def raw(self, token, path, content, **headers):
        said = {"content-type": "application/json", **headers, **self.as_(token)}
        return await self.client.post(path, content=content, headers=said)

    async def counted(self, line):
        text = (await self.client.get("/metrics", headers=self.as_(OPERATOR))).text
        found = [each for each in text.splitlines() if each.startswith(f"{line} ")]
        return float(found[0].split()[-1]) if found else None

    async def is_well(self):
        answer = await self.ask(GATEWAY, "/select", {"token_ids": PROMPT})
        return answer.status_code == 200


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(TOKENS)
    return path


@pytest.fixture
async def router(token_file):
    fields = {"use_kv_events": False, "body_limit_bytes": 1 << 20}
    guarded = GuardedRouter(token_file=str(token_file), **fields)
    async with guarded.running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        assert (await router.ask(OPERATOR, "/workers", worker)).status_code == 201
        yield router
        assert await router.is_well()  # the next request is unharmed


async def begun(router, token):
    """The beginning of what is answered to a request whose body never comes to its end."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    said = {**router.as_(token), "content-type": "application/json", "content-length": "20"}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    writer.write(f"POST /select HTTP/1.1\r\nhost: x\r\n{head}\r\n{{".encode())
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b'"code":"') + await reader.readuntil(b'"')
    writer.close()
    return answer


async def test_every_route_but_probes_requires_a_token(router):
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert (await router.client.get(path)).status_code in (200, 503)
    for path in ("/workers", "/dump", "/config", "/metrics", "/loads", "/nothing"):
        answer = await router.client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["code"] == "unauthenticated"
    for path in ("/select", "/select_and_reserve", "/reservations", "/reservations/x/free"):
        assert (await router.ask(None, path, {"token_ids": PROMPT})).status_code == 401
        assert (await router.ask("wrong", path, {"token_ids": PROMPT})).status_code == 401
    assert await router.counted('kv_router_refusals_total{code="unauthenticated",interface="http"}')


async def test_stranger_learns_only_whether_the_router_is_ready(router):
    ready = await router.client.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "reason": None})
    for token, status in ((None, 403), ("wrong", 403), (GATEWAY, 403), (OPERATOR, 200)):
        answer = await router.client.get("/ready?verbose=1", headers=router.as_(token))
        assert answer.status_code == status
        assert ("http://w" in answer.text) == (status == 200)
    operator = (await router.client.get("/ready", headers=router.as_(OPERATOR))).json()
    assert operator["schedulable_workers"] == 1


async def test_stranger_sees_no_address_of_the_bus_and_nobody_its_password(token_file):
    url = f"nats://svc:s3cr@t@127.0.0.1:{free_port()}"
    async with RunningRouter(url, token_file=str(token_file)).running() as router:
        stranger, operator = [
            (await router.client.get("/ready", headers=headers)).json()["reason"]
            for headers in ({}, {"authorization": f"Bearer {OPERATOR}"})
        ]
    assert "nats://***" in stranger
    assert "127.0.0.1" not in stranger
    assert "nats://***@127.0.0.1" in operator
    assert "s3cr" not in operator


async def test_addresses_without_token_have_a_rate_and_probes_none(token_file):
    guarded = GuardedRouter(
        use_kv_events=False, token_file=str(token_file), open_requests_per_s=0.01
    )
    async with guarded.running() as router:
        pages = [(await router.client.get("/openapi.json")).status_code for _ in range(3)]
        assert pages == [200, 429, 429]
        own = await router.client.get("/openapi.json", headers=router.as_(GATEWAY))
        assert own.status_code == 200
        probes = {(await router.client.get("/health")).status_code for _ in range(50)}
        assert probes == {200}


async def test_a_scope_is_not_another(router):
    for token, path in ((GATEWAY, "/dump"), (ACME, "/metrics"), (ACME, "/workers")):
        answer = await router.client.get(path, headers=router.as_(token))
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert (await router.ask(OPERATOR, "/select", {"token_ids": PROMPT})).status_code == 403
    assert (await router.client.get("/dump", headers=router.as_(OPERATOR))).status_code == 200


async def test_tokens_that_change_count_without_a_restart(router, token_file):
    async def status(token):
        return (await router.client.get("/config", headers=router.as_(token))).status_code

    assert (await status(OPERATOR), await status(OPERATOR + "2")) == (200, 401)
    token_file.write_text(TOKENS.replace(OPERATOR, OPERATOR + "2"))
    try:

        async def is_new():
            return (await status(OPERATOR), await status(OPERATOR + "2")) == (401, 200)

        await eventually(is_new)
        token_file.write_text("nonsense")  # a mistake takes no caller's access
        failures = router.service.host.edge.watched[0]
        await eventually(lambda: failures.failures == 1)
        assert await is_new()
    finally:
        token_file.write_text(TOKENS)
        assert router.service.host.edge.reloaded("unchanged") == ["tokens: read again"]
    assert await status(OPERATOR) == 200


async def test_repeated_requests_end_with_their_token(router, token_file):
    """Their head is not parsed again, and its token is found again only once tokens change."""

    async def statuses():
        asked = [await router.ask(GATEWAY, "/select", {"token_ids": PROMPT}) for _ in range(4)]
        return {answer.status_code for answer in asked}

    edge = router.service.host.edge
    try:
        assert await statuses() == {200}
        for text, status in ((TOKENS.replace(GATEWAY, "x" * 20), 401), (TOKENS, 200)):
            token_file.write_text(text)
            edge.reloaded("unchanged")
            assert await statuses() == {status}
    finally:
        token_file.write_text(TOKENS)
        edge.reloaded("unchanged")


ENDINGS = {
    "removed": "",
    "expired": token_lines("viewer", "admin") + "expires = 2020-01-01T00:00:00Z\n",
    "without its scope": token_lines("viewer", "metrics"),
    "with another secret": token_lines("viewer", "admin", token=token_of("another")),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_dashboard_stream_ends_with_its_token(tmp_path, ending):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS + token_lines("viewer", "admin"))
    async with GuardedRouter(token_file=str(path)).running() as router:
        stream = router.client.stream(
            "GET", "/dashboard/stream", headers=router.as_(token_of("viewer"))
        )
        async with asyncio.timeout(60), stream as response:
            frames = response.aiter_lines()
            assert (await anext(frames)).startswith("data: ")
            path.write_text(TOKENS + ENDINGS[ending])
            async for _ in frames:
                pass


async def test_rate_limited_caller_gets_429_with_retry_after(router):
    for _ in range(2):
        assert (await router.ask(SLOW, "/select", {"token_ids": PROMPT})).status_code == 200
    answer = await router.ask(SLOW, "/select", {"token_ids": PROMPT})
    assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
    assert 1 <= int(answer.headers["retry-after"]) <= 1000
    line = 'kv_router_refusals_total{code="rate_limited",interface="http"}'
    assert await router.counted(line) == 1


BOMB = gzip.compress(bytes(50_000_000), 9)
DEEP = b'{"token_ids":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("content", "headers", "statuses"),
    [
        (b'{"token_ids":[4294967296]}', {}, (422,)),
        (b'{"token_ids":[-1]}', {}, (422,)),
        (b'{"token_ids":[1e99]}', {}, (422,)),
        (b'{"token_ids":[NaN]}', {}, (400, 422)),
        (b'{"token_ids":[1],"max_wait_s":NaN}', {}, (400,)),
        (b'{"token_ids":[1],"token_ids":[2]}', {}, (400, 422)),
        (b'{"token_ids":[1],"model_name":"\xff\xfe"}', {}, (400,)),
        (DEEP, {}, (400, 422)),
        (b"", {}, (400,)),
        (b"token_ids=1", {"content-type": "application/x-www-form-urlencoded"}, (415,)),
        (b"{}", {"content-type": "text/plain"}, (415,)),
        (BOMB, {"content-encoding": "gzip"}, (415,)),
        (b'{"token_ids":[1]}', {"content-encoding": "identity, gzip"}, (415,)),
        (b" " * (1 << 20) + b"{}", {}, (413,)),
    ],
)
@pytest.mark.parametrize("path", ["/select", "/potential_loads"])
async def test_invalid_bodies_are_refused(router, path, content, headers, statuses):
    said = {k: v.encode("latin-1") for k, v in headers.items()}
    answer = await router.raw(GATEWAY, path, content, **said)
    assert answer.status_code in statuses
    assert set(answer.json()) >= {"error", "code"}


async def test_hundred_megabyte_body_is_refused_by_length_or_limit(router):
    async def chunks():
        for _ in range(1600):
            yield bytes(65_536)

    for length in ({"content-length": str(1600 * 65_536)}, {}):
        with_length = {**router.as_(GATEWAY), "content-type": "application/json", **length}
        try:
            answer = await router.client.post("/select", content=chunks(), headers=with_length)
        except httpx.TransportError:
            continue  # closed while it was still sending
        assert answer.status_code == 413


async def test_a_body_that_comes_slowly_is_refused(token_file):
    fields = {"use_kv_events": False, "body_timeout_s": 0.5}
    async with GuardedRouter(token_file=str(token_file), **fields).running() as router:
        answer = await begun(router, GATEWAY)
    assert answer.startswith(b"HTTP/1.1 408")
    assert answer.endswith(b'"body_timeout"')


async def test_a_bad_token_is_refused_before_its_body_is_read(router):
    assert (await begun(router, "guess")).endswith(b'"unauthenticated"')


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/docs/../dump", "/%2e%2e/dump", "/dump%00", "/select/..%2fdump", "//dump"],
)
async def test_no_path_leads_around_the_guard(router, path):
    url = httpx.URL(str(router.client.base_url)).copy_with(raw_path=path.encode())
    answer = await router.client.get(url, headers=router.as_(GATEWAY))
    assert answer.status_code == 403
    assert "root:" not in answer.text


async def test_forbidden_prompt_test_reaches_no_engine(router):
    async with Upstream(hangs).running() as engine:
        worker = {"worker_id": 2, "endpoint": engine.url, "block_size": 4}
        assert (await router.ask(OPERATOR, "/workers", worker)).status_code == 201
        for body in ({"text": "x"}, {"text": "x", "cache_salt": "acme"}):
            answer = await router.ask(EVIL, "/dashboard/look", body)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        asked = [head for head, _ in engine.requests]
        assert all(head.startswith("GET /metrics ") for head in asked)  # the router's own polls
        gone = await router.client.delete("/workers/2", headers=router.as_(OPERATOR))
        assert gone.status_code == 200


async def test_a_tenant_cannot_end_or_take_anothers_request(router):
    body = {"token_ids": PROMPT, "request_id": "r", "cache_salt": "acme"}
    assert (await router.ask(ACME, "/select_and_reserve", body)).json()["request_id"] == "r"
    evil = router.as_(EVIL)
    for stolen in ("r", "acme/r", "acme%2Fr", "../acme/r"):
        answer = await router.client.delete(f"/reservations/{stolen}", headers=evil)
        assert answer.status_code in (403, 404)
        step = await router.ask(EVIL, f"/reservations/{stolen}/prefill_complete", None)
        assert step.status_code in (403, 404)
    again = await router.ask(ACME, "/select_and_reserve", body)
    assert (again.status_code, again.json()["request_id"]) == (409, "r")
    theirs = await router.ask(EVIL, "/select_and_reserve", {**body, "cache_salt": "evil"})
    assert theirs.status_code == 200
    steps = {"steps": [{"step": "free", "request_id": "r"}]}
    await router.ask(EVIL, "/reservations:batch", steps)
    answer = await router.client.delete("/reservations/r", headers=router.as_(ACME))
    assert answer.status_code == 200


async def test_a_tenant_does_not_go_ahead_of_others(router):
    ahead = {"token_ids": PROMPT, "cache_salt": "evil", "strict_priority": 1}
    override = {"router_config_override": {"track_prefill_tokens": False}}
    hidden = {"token_ids": PROMPT, "cache_salt": "evil", **override}
    for path in ("/select", "/select_and_reserve", "/dashboard/look"):
        for body in (ahead, hidden):
            answer = await router.ask(EVIL, path, body)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), path
    booked = {**hidden, "worker_id": 1, "request_id": "h"}
    answer = await router.ask(EVIL, "/reservations", booked)
    assert answer.status_code == 403
    assert answer.json()["field"] == "router_config_override.track_prefill_tokens"
    batch = await router.ask(EVIL, "/select:batch", {"requests": [ahead]})
    assert batch.json()["results"][0]["status"] == 403
    answer = await router.ask(GATEWAY, "/select", {**ahead, **hidden})
    assert answer.status_code == 200


async def test_a_tenant_books_what_it_selected_and_nothing_else(router):
    selected = {"token_ids": PROMPT, "selection_id": "s", "cache_salt": "acme"}
    assert (await router.ask(ACME, "/select", selected)).status_code == 200
    for request_id in ("s", "acme/s"):
        answer = await router.ask(EVIL, "/reservations", {"selection_id": request_id})
        assert (answer.status_code, answer.json()["selection_id"]) == (404, request_id)
    answer = await router.ask(ACME, "/reservations", {"selection_id": "s"})
    assert (answer.status_code, answer.json()["request_id"]) == (201, "s")


async def test_a_tenant_cannot_probe_what_another_has_asked(router):
    secret = {"token_ids": PROMPT, "request_id": "s", "cache_salt": "acme"}
    assert (await router.ask(ACME, "/select_and_reserve", secret)).status_code == 200
    probes = (
        {"token_ids": PROMPT},
        {"token_ids": PROMPT, "cache_salt": "acme"},
        {"sequence_hashes": [1], "isl_tokens": 4, "cache_salt": "evil"},
        {"token_ids": PROMPT, "cache_salt": "evil", "tenant": "acme"},
    )
    for probe in probes:
        for path in ("/select", "/overlap_scores", "/potential_loads"):
            if "tenant" in probe and path != "/select":
                continue
            answer = await router.ask(EVIL, path, probe)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    own = await router.ask(EVIL, "/overlap_scores", {"token_ids": PROMPT, "cache_salt": "evil"})
    assert {each["device_blocks"] for each in own.json()["workers"]} == {0}
    known = await router.ask(ACME, "/overlap_scores", {"token_ids": PROMPT, "cache_salt": "acme"})
    assert {each["device_blocks"] for each in known.json()["workers"]} == {10}


async def test_tokens_appear_in_no_response_and_no_log(router, caplog):
    caplog.set_level(logging.DEBUG)
    texts = []
    for token in (GATEWAY, OPERATOR, "a-guess-that-is-wrong"):
        for path in ("/config", "/dump", "/metrics", "/select"):
            answer = await router.client.get(path, headers=router.as_(token))
            texts.append(answer.text + str(answer.headers))
    reported = "".join([*texts, caplog.text])
    for token in (GATEWAY, OPERATOR, ACME, "a-guess-that-is-wrong"):
        assert token not in reported


async def test_caller_input_creates_no_log_lines_and_no_metrics(router, caplog):
    caplog.set_level(logging.DEBUG)
    before = len((await router.client.get("/metrics", headers=router.as_(OPERATOR))).text)
    for number in range(200):
        await router.client.get(f"/nothing-{number}", headers=router.as_(OPERATOR))
        body = {"token_ids": PROMPT, "model_name": f"m{number}\nERROR forged", f"f{number}": 1}
        await router.ask(GATEWAY, "/select", {**body, "policy_class": f"c{number}"})
    after = (await router.client.get("/metrics", headers=router.as_(OPERATOR))).text
    assert len(after) < before + 5_000
    assert "forged" not in after
    assert "nothing-7" not in after
    lines = [f.format(r) for r in caplog.records for f in (TextLines(), JsonLines())]
    assert any("forged" in each for each in lines)
    assert not [each for each in lines if "\n" in each]


async def test_requests_in_flight_are_bounded_and_probes_are_answered(token_file):
    """A request that waits for a rank is in flight."""
    fields = {"use_kv_events": False, "router_queue_threshold": 0.0, "max_requests": 2}
    async with GuardedRouter(token_file=str(token_file), **fields).running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        await router.ask(OPERATOR, "/workers", {**worker, "max_num_batched_tokens": 16})
        first = {"token_ids": PROMPT, "request_id": "x"}
        assert (await router.ask(GATEWAY, "/select_and_reserve", first)).status_code == 200
        waiting = [
            asyncio.create_task(
                router.ask(GATEWAY, "/select_and_reserve", {**first, "request_id": f"w{number}"})
            )
            for number in range(2)
        ]

        async def is_full():
            answer = await router.ask(GATEWAY, "/select", {"token_ids": PROMPT})
            return answer.status_code == 503 and answer.json()["code"] == "too_many_requests"

        await eventually(is_full)
        for path in ("/health", "/ready"):
            assert (await router.client.get(path)).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await eventually(router.is_well)

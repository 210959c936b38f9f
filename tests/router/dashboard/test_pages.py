"""The page over HTTP: its headers, its streams, and its question."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from router.dashboard import tokenizing
from router.dashboard.page_files import page_files
from router.runtime.security.route_scopes import OPEN
from support.engines.upstreams import Upstream
from support.fleets.direct import DirectRouter
from support.processes.servers import eventually

TOKENS = """
[[tokens]]
name = "boss"
token = "boss-boss-boss-boss"
scopes = ["route", "admin", "metrics"]
[[tokens]]
name = "acme"
token = "acme-acme-acme-acme"
scopes = ["route"]
tenant = "acme"
routing_groups = ["acme"]
"""
BOSS = {"authorization": "Bearer boss-boss-boss-boss"}
ACME = {"authorization": "Bearer acme-acme-acme-acme"}


@pytest.fixture
async def router():
    async with DirectRouter(use_kv_events=False).running() as router:
        yield router


@pytest.fixture
async def guarded(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    async with DirectRouter(use_kv_events=False, token_file=str(path)).running() as router:
        yield router


async def register(router, worker_id=1, endpoint="http://w", **fields):
    body = {"worker_id": worker_id, "endpoint": endpoint, "block_size": 4}
    headers = fields.pop("headers", {})
    answer = await router.post("/workers", {**body, **fields}, headers=headers)
    assert answer.status_code == 201, answer.text


async def frames(router, is_enough, headers=None):
    """Frames of a stream, up to one that is enough."""
    seen = []
    async with router.client.stream("GET", "/dashboard/stream", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if is_enough(seen[-1]):
                    return seen
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("name", sorted(page_files()))
async def test_a_file_comes_with_what_keeps_it_safe_and_is_sent_once(router, name):
    path = "/" if name == "index.html" else f"/dashboard/files/{name}"
    first = await router.client.get(path)
    assert first.status_code == 200
    policy = first.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert first.headers["x-content-type-options"] == "nosniff"
    known = {"if-none-match": f'"x", W/{first.headers["etag"]}'}
    again = await router.client.get(path, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]


async def test_the_page_names_no_other_host():
    for name, file in page_files().items():
        text = file.content.decode()
        text = text.replace("http://www.w3.org/2000/svg", "").replace("nats://…", "")
        assert "//" not in text.replace("// ", "").replace("://`", ""), name
        assert ".innerHTML" not in text
        assert "style=" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_in_the_documentation_are_small(scheme):
    picture = Path(__file__).parents[3] / f"docs/pictures/dashboard-{scheme}.png"
    assert 10_000 < picture.stat().st_size < 200 * 1024


async def test_unknown_files_and_paths_out_of_the_folder_are_not_there(router):
    for name in ("nothing.js", "..%2F__init__.py", "%2e%2e/handlers.py", "README.md"):
        assert (await router.client.get(f"/dashboard/files/{name}")).status_code == 404


async def test_stream_shows_workers_and_decisions(router, eventually):
    await register(router)
    watching = asyncio.create_task(frames(router, lambda frame: frame.get("decisions")))
    metric = "kv_router_dashboard_streams"
    await eventually(lambda: _is(router, metric, 1))
    await eventually(lambda: _is_above(router, "kv_router_dashboard_frames_total", 0))
    answer = await router.post("/select_and_reserve", {"token_ids": [*range(8)], "request_id": "r"})
    assert answer.status_code == 200
    first, *rest = await watching
    assert first["is_whole"]
    assert first["workers"][0][:2] == ["1", "worker 1"]
    (seen,) = [each for frame in rest for each in frame.get("decisions", ())]
    assert (seen["is_booked"], seen["decision"]["request_id"]) == (True, "r")
    await eventually(lambda: _is(router, metric, 0))
    assert await router.metric("kv_router_dashboard_shown_decisions_total") == 1
    assert await router.metric("kv_router_dashboard_seconds_total") > 0


async def test_decisions_without_a_viewer_are_skipped(router):
    await register(router)
    for _ in range(3):
        assert (await router.post("/select", {"token_ids": [1]})).status_code == 200
    assert await router.metric("kv_router_dashboard_shown_decisions_total") == 0
    assert await router.metric("kv_router_dashboard_skipped_decisions_total") == 0


async def test_stream_shows_removed_workers_as_events(router):
    await register(router)
    assert (await router.client.delete("/workers/1")).status_code == 200
    (whole,) = await frames(router, bool)
    assert [(each["kind"], each["about"]) for each in whole["events"]] == [("worker_gone", "1")]


async def test_streams_beyond_the_limit_are_refused():
    router = DirectRouter(use_kv_events=False, max_dashboard_streams=1)
    async with router.running():
        async with router.client.stream("GET", "/dashboard/stream") as first:
            assert first.status_code == 200
            answer = await router.client.get("/dashboard/stream")
            assert (answer.status_code, answer.json()["code"]) == (503, "too_many_streams")
        await eventually(lambda: _watches(router))


async def test_stopping_router_ends_open_streams(router):
    async with router.client.stream("GET", "/dashboard/stream") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        router.stop()
        async for _ in lines:
            pass


async def test_look_books_and_counts_nothing(router):
    await register(router)
    await register(router, 2)
    body = {"token_ids": [*range(40)], "allowed_worker_ids": [2], "request_id": "x"}
    answer = await router.post("/dashboard/look", body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert (said["decision"]["worker_id"], said["tokenized_by"]) == (2, None)
    assert said["first_tokens"] == [*range(16)]
    assert said["decision"]["removed"][0]["filter"] == "allowed_worker_ids"
    assert await router.metric('kv_router_decisions_total{command="select"}') == 0
    assert await router.metric("kv_router_reservations") == 0


async def test_look_without_an_answer_says_why(router):
    answer = await router.post("/dashboard/look", {"token_ids": [1]})
    assert (answer.status_code, answer.json()["code"]) == (503, "no_endpoints")
    answer = await router.post("/dashboard/look", {"text": "x", "token_ids": [1]})
    assert (answer.status_code, answer.json()["field"]) == (400, "text")
    for body in ({"text": ""}, {"text": "x" * 300_000}, {"token_ids": [-1]}):
        assert (await router.post("/dashboard/look", body)).status_code == 422


async def test_without_a_tokenizing_engine_a_text_is_refused(router):
    await register(router, endpoint="http://127.0.0.1:9")
    answer = await router.post("/dashboard/look", {"text": "x"})
    assert (answer.status_code, answer.json()["code"]) == (422, "no_tokenizer")
    assert "127.0.0.1" not in answer.text


async def test_text_is_tokenized_by_an_engine(router):
    async def tokenize(upstream, writer):
        asked = msgspec.json.decode(upstream.requests[-1][1])
        text = asked["prompt"] if "prompt" in asked else f"chat:{asked['messages'][0]['content']}"
        body = msgspec.json.encode({"tokens": list(text.encode())})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with Upstream(tokenize).running() as engine:
        await register(router, endpoint=engine.url)
        said = (await router.post("/dashboard/look", {"text": "abc"})).json()
        assert (said["first_tokens"], said["tokenized_by"]) == ([97, 98, 99], "worker 1")
        said = (await router.post("/dashboard/look", {"text": "abc", "is_chat": True})).json()
        assert (said["decision"]["isl_tokens"], said["first_tokens"][:2]) == (8, [99, 104])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "responds 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "no list of tokens"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", "timeout"),
    ],
)
async def test_engine_without_a_tokenizer_is_an_error_with_its_reason(
    router, monkeypatch, answer, why
):
    if why == "timeout":
        monkeypatch.setattr(tokenizing, "PATIENCE_S", 0.2)

    async def script(_, writer):
        writer.write(answer)
        await writer.drain()

    async with Upstream(script).running() as engine:
        await register(router, endpoint=engine.url)
        said = await router.post("/dashboard/look", {"text": "abc"})
        assert (said.status_code, said.json()["code"]) == (422, "no_tokenizer")
        assert why in said.json()["error"]
        assert engine.url not in said.text


async def test_without_a_token_only_the_page_is_served(guarded):
    assert (await guarded.client.get("/")).status_code == 200
    assert "GET /" in OPEN
    assert (await guarded.client.get("/dashboard/stream")).status_code == 401
    assert (await guarded.post("/dashboard/look", {"token_ids": [1]})).status_code == 401
    (whole,) = await frames(guarded, bool, BOSS)
    assert whole["is_whole"]


async def test_tenant_looks_in_its_own_group_and_gets_no_stream(guarded):
    await register(guarded, headers=BOSS)
    await register(guarded, 2, routing_group="acme", headers=BOSS)
    assert (await guarded.client.get("/dashboard/stream", headers=ACME)).status_code == 403
    body = {"token_ids": [*range(8)], "request_id": "r", "cache_salt": "acme"}
    other = await guarded.post("/dashboard/look", body, headers=ACME)
    assert (other.status_code, other.json()["field"]) == (403, "routing_group")
    own = await guarded.post("/dashboard/look", {**body, "routing_group": "acme"}, headers=ACME)
    assert own.status_code == 200, own.text
    assert (own.json()["decision"]["worker_id"], own.json()["decision"]["request_id"]) == (2, "r")


async def _is(router, name, value):
    return await router.metric(name) == value


async def _is_above(router, name, value):
    return await router.metric(name) > value


async def _watches(router):
    async with router.client.stream("GET", "/dashboard/stream") as answer:
        return answer.status_code == 200

"""The OpenAI endpoint in a router's process, before scripted engines."""

import asyncio
import json
import logging
import socket

import httpx
import pytest

from router.core.views.workers import loads
from router.errors import ConfigError
from router.runtime.process.loading import Loaded
from router.runtime.process.settings import with_settings
from support.engines.upstreams import (
    STREAM_END,
    STREAM_HEAD,
    event,
    hangs,
    hangs_up,
    response,
    says,
)
from support.fleets.forwarding import COMPLETION, Scene, lines
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port
from support.values.token_files import token_lines, token_of

USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
ANSWER = {"id": "x", "choices": [{"index": 0, "text": "hi"}], "usage": USAGE}
JSON = "content-type: application/json"
ANSWERS = says(response(json.dumps(ANSWER).encode(), "200 OK", JSON))


def piece(text, **fields):
    return event({"id": "i", "choices": [{"index": 0, "text": text, **fields}]})


LAST = piece("b", finish_reason="length") + event({"choices": [], "usage": USAGE})
END = event(b"[DONE]") + STREAM_END


class HeldStream:
    """A script that writes a first piece, and the rest once it may `go_on`."""

    def __init__(self):
        self.go_on = asyncio.Event()

    async def __call__(self, _, writer):
        writer.write(STREAM_HEAD + piece("a"))
        await self.go_on.wait()
        writer.write(LAST + END)


@pytest.fixture
def scene(nats_server):
    def of(*scripts, **fields):
        return Scene.in_router(nats_server.url, dict(enumerate(scripts, 1)), **fields)

    return of


def stream(its):
    body = {**COMPLETION, "stream": True}
    return its.forward.client.stream("POST", "/v1/completions", json=body)


async def rank(its):
    ((only,),) = [scope["loads"] for scope in (await its.router.client.get("/loads")).json()]
    return only["active_requests"], only["potential_prefill_tokens"]


async def test_completion_is_answered_by_an_engine_and_its_booking_freed(scene):
    async with scene(ANSWERS) as its:
        answer = await its.forward.complete(headers={"x-request-id": "r1"})
        assert (answer.status_code, answer.json()) == (200, ANSWER)
        assert (answer.headers["x-worker-id"], answer.headers["x-request-id"]) == ("1", "r1")
        assert its.asked(1) == [COMPLETION]
        await its.until_free()
        await its.forward.until_ended("answered")


async def test_completion_sends_no_request_to_the_routers_own_port(scene):
    async with scene(ANSWERS) as its:
        await its.forward.complete()
        await its.until_free()
        text = (await its.router.client.get("/metrics")).text
        for route in ("/select_and_reserve", "/reservations:batch"):
            assert f'route="{route}"' not in text
        usage = "kv_router_usage_cached_tokens_total"
        assert await its.router.metric(usage) == USAGE["prompt_tokens_details"]["cached_tokens"]


async def test_both_ports_show_the_metrics_of_router_and_endpoint(scene):
    async with scene(ANSWERS) as its:
        await its.forward.complete()
        line = 'kv_router_forward_requests_total{ended="answered",route="POST /v1/completions"}'
        assert await its.router.metric(line) == 1
        assert await its.forward.metric("kv_router_tokens") == 0


async def test_stream_arrives_in_pieces_and_reports_progress(scene):
    held = HeldStream()
    async with scene(held) as its:
        async with stream(its) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            got = answer.aiter_text()
            assert json.loads(lines(await anext(got))[0])["choices"][0]["text"] == "a"

            async def is_prefilled():
                return await rank(its) == (1, 0)

            await eventually(is_prefilled)
            held.go_on.set()
            rest = "".join([text async for text in got])
        assert lines(rest)[-1] == "[DONE]"
        await its.until_free()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_vanished_client_frees_its_booking_and_stops_the_engine(scene, is_stream):
    async def script(_, writer):
        if is_stream:
            writer.write(STREAM_HEAD + piece("a"))
        await hangs(_, writer)

    async with scene(script) as its:
        body = json.dumps({**COMPLETION, "stream": is_stream}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", its.forward.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + body)
        await eventually(lambda: its.engines[1].requests)
        writer.close()
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()
        await its.forward.until_ended("client_gone")


async def test_waiting_request_is_withdrawn_with_its_client(scene):
    async with scene(hangs, router_fields={"router_queue_threshold": 0.0}) as its:
        first = asyncio.create_task(its.forward.complete(prompt=[1] * 64))
        await eventually(lambda: its.engines[1].requests)
        second = asyncio.create_task(its.forward.complete(prompt=[2] * 64))
        waiting = its.router.service.host.core.waiting
        await eventually(lambda: len(waiting) == 1)
        second.cancel()
        await eventually(lambda: len(waiting) == 0)
        first.cancel()
        await its.until_free()


async def test_waiting_request_is_placed_when_another_ends(scene):
    held = HeldStream()
    async with scene(held, router_fields={"router_queue_threshold": 0.0}) as its:
        first = asyncio.create_task(its.forward.complete(prompt=[1] * 64, stream=True))
        await eventually(lambda: its.engines[1].requests)
        async with asyncio.TaskGroup() as group:
            second = group.create_task(its.forward.complete(prompt=[2] * 64, stream=True))
            held.go_on.set()
        assert lines((await first).text)[-1] == lines(second.result().text)[-1] == "[DONE]"
        await its.until_free()


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "zz"}, 404, "model_not_found"),
        ({"prompt": [1, -1]}, 400, "invalid_field"),
        ({"nvext": {"agent_hints": {"latency_sensitivity": -1.0}}}, 400, "invalid_field"),
    ],
    ids=["model", "tokens", "hint"],
)
async def test_refused_request_has_the_status_of_a_separate_forwarder(
    nats_server, fields, status, code
):
    for scene in (Scene.of, Scene.in_router):
        async with scene(nats_server.url, {1: ANSWERS}) as its:
            answer = await its.forward.complete(**fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert not its.engines[1].requests
            await its.until_free()


async def test_request_without_workers_is_refused_for_now(nats_server):
    async with Scene.in_router(nats_server.url, {}) as its:
        answer = await its.forward.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoints")
        assert (await its.forward.client.get("/ready")).status_code == 503


async def test_failed_worker_is_passed_over(scene):
    async with scene(hangs_up, ANSWERS) as its:
        for _ in range(8):
            assert (await its.forward.complete()).json() == ANSWER
        await its.until_free()


async def test_long_prompt_is_placed_by_its_tokens(scene):
    async with scene(ANSWERS) as its:
        prompt = list(range(100_000, 130_000))
        assert (await its.forward.complete(prompt=prompt)).json() == ANSWER
        await its.until_free()
        assert await its.router.metric("kv_router_usage_prompt_tokens_total") == 5


async def test_models_are_those_of_the_routers_workers(scene):
    async with scene(ANSWERS) as its:
        (model,) = (await its.forward.client.get("/v1/models")).json()["data"]
        assert model["id"] == "default"
        await eventually(its.forward.is_ready)


async def test_token_file_of_the_router_holds_for_the_endpoint(scene, tmp_path, bus, nats_server):
    path = tmp_path / "tokens.toml"
    path.write_text(token_lines("a", "route"))
    router = RunningRouter(nats_server.url, openai_port=free_port(), token_file=str(path))
    url = f"http://127.0.0.1:{router.config.openai.openai_port}/v1/models"
    async with router.running():
        assert (await router.client.get(url)).status_code == 401
        headers = {"authorization": f"Bearer {token_of('a')}"}
        assert (await router.client.get(url, headers=headers)).json()["data"] == []
        assert (await router.client.get("/loads", headers=headers)).status_code == 403


async def test_reload_changes_the_limits_of_both_ports(scene):
    async with scene(ANSWERS) as its:
        config = with_settings(its.router.config, {"body_limit_bytes": 1024})
        its.router.service.reconfigure(Loaded(config, {}))
        for running, path in ((its.forward, "/v1/completions"), (its.router, "/select")):
            answer = await running.post(path, {**COMPLETION, "prompt": [1] * 2000})
            assert answer.status_code == 413


async def test_log_tells_where_the_endpoint_listens(scene, caplog):
    with caplog.at_level(logging.INFO):
        async with scene() as its:
            pass
    assert f"OpenAI endpoint listens on http://127.0.0.1:{its.forward.port}" in caplog.messages


async def test_taken_port_is_refused_by_its_settings_name(nats_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router = RunningRouter(nats_server.url, openai_port=taken.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            await router.service.run(asyncio.Event())
    await router.client.aclose()
    assert caught.value.key == "openai_port"


async def test_open_stream_ends_before_the_process(scene):
    held = HeldStream()
    async with scene(held, router_fields={"drain_s": 1.0}) as its:
        async with stream(its) as answer:
            got = answer.aiter_text()
            await anext(got)
            its.router.stop()
            await eventually(lambda: its.router.service.host.status.is_draining)
            held.go_on.set()
            rest = "".join([text async for text in got])
        assert lines(rest)[-1] == "[DONE]"
    assert active_requests(its) == 0


async def test_endless_stream_is_cut_off_and_its_booking_freed(scene):
    async with scene(HeldStream()) as its, stream(its) as answer:
        got = answer.aiter_text()
        await anext(got)
        its.router.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(got)
    assert active_requests(its) == 0


def active_requests(its):
    """After the end of the process."""
    scopes = loads(its.router.service.host.core)
    return sum(load.active_requests for scope in scopes for load in scope.loads)

"""Requests before a real router and scripted engines."""

import asyncio
import json

import pytest

from support.engines.upstreams import (
    STREAM_END,
    STREAM_HEAD,
    Upstream,
    event,
    hangs,
    hangs_up,
    response,
    says,
)
from support.fleets.forwarding import COMPLETION, RunningForward, Scene, lines
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port, until_still

LOADS_ASKED = 'kv_router_requests_total{code="200",interface="http",route="/loads"}'
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
ANSWER = {"id": "x", "choices": [{"index": 0, "text": "hi"}], "usage": USAGE}
JSON = "content-type: application/json"
ANSWERS = says(response(json.dumps(ANSWER).encode(), "200 OK", JSON, "x-engine: 1"))


def piece(text, **fields):
    return event({"id": "i", "choices": [{"index": 0, "text": text, **fields}]})


def post(body):
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + body


STREAMS = says(
    STREAM_HEAD,
    piece("a"),
    piece("b", finish_reason="length"),
    event({"choices": [], "usage": USAGE}),
    event(b"[DONE]"),
    STREAM_END,
)


@pytest.fixture
def scene(nats_server):
    def of(*scripts, **fields):
        return Scene.of(nats_server.url, dict(enumerate(scripts, 1)), **fields)

    return of


async def test_response_names_its_worker(scene):
    async with scene(ANSWERS) as its:
        answer = await its.forward.complete(headers={"x-request-id": "r1", "x-mine": "2"})
        assert (answer.status_code, answer.json()) == (200, ANSWER)
        for name, value in (
            ("x-worker-id", "1"),
            ("x-data-parallel-rank", "0"),
            ("x-predicted-cached-tokens", "0"),
            ("x-forward-attempts", "1"),
            ("x-request-id", "r1"),
            ("x-engine", "1"),
        ):
            assert answer.headers[name] == value
        head = its.engines[1].requests[0][0]
        assert "x-data-parallel-rank: 0" in head
        assert "x-request-id: r1" in head
        assert "x-mine: 2" in head
        assert its.asked(1) == [COMPLETION]
        await its.until_free()
        await its.forward.until_ended("answered")


async def test_stream_arrives_in_pieces_and_reports_progress(scene):
    go_on = asyncio.Event()

    async def script(_, writer):
        writer.write(STREAM_HEAD + piece("a"))
        await go_on.wait()
        writer.write(b"".join(piece("b") for _ in range(20)) + event(b"[DONE]") + STREAM_END)

    async with scene(script) as its:
        body = {**COMPLETION, "stream": True}
        async with its.forward.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            got = answer.aiter_text()
            first = await anext(got)
            assert json.loads(lines(first)[0])["choices"][0]["text"] == "a"

            async def prefilled():
                ((rank,),) = [s["loads"] for s in (await its.router.client.get("/loads")).json()]
                return (rank["active_requests"], rank["potential_prefill_tokens"]) == (1, 0)

            await eventually(prefilled)
            go_on.set()
            rest = "".join([text async for text in got])
        assert lines(rest)[-1] == "[DONE]"
        assert len(lines(rest)) == 21
        await its.until_free()
        assert its.asked(1)[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("wants", [True, False])
async def test_usage_is_shown_on_request(scene, wants):
    async with scene(STREAMS) as its:
        options = {"stream_options": {"include_usage": True}} if wants else {}
        answer = await its.forward.complete(stream=True, **options)
        said = [json.loads(line) for line in lines(answer.text)[:-1]]
        assert [each.get("usage") for each in said if not each["choices"]] == [USAGE] * wants
        await its.until_free()


async def test_chats_and_texts_are_forwarded_without_claiming_any_overlap(scene):
    async with scene(ANSWERS) as its:
        answer = await its.forward.post(
            "/v1/chat/completions",
            {"model": "default", "messages": [{"role": "user", "content": "x"}]},
        )
        assert answer.json() == ANSWER
        assert (await its.forward.complete(prompt="Once upon a time")).json() == ANSWER
        await its.until_free()


@pytest.mark.parametrize("header", ["x-session-id", "x-dynamo-session-id"])
async def test_a_conversation_stays_where_its_first_request_went(scene, header):
    settings = {"session_affinity_ttl_s": 600.0}
    async with scene(ANSWERS, ANSWERS, ANSWERS, router_fields=settings) as its:
        for conversation in range(6):
            answers = [
                await its.forward.complete(headers={header: f"c{conversation}"}, prompt=[turn] * 9)
                for turn in range(3)
            ]
            assert len({each.headers["x-worker-id"] for each in answers}) == 1


async def test_sessions_of_agents_reach_the_router_as_hints_and_hashes(scene):
    settings = {"session_affinity_ttl_s": 600.0}
    async with scene(ANSWERS, ANSWERS, ANSWERS, router_fields=settings) as its:
        for conversation in range(4):
            headers = {"x-claude-code-session-id": f"c{conversation}"}
            for turn in range(3):
                await its.forward.complete(headers=headers, prompt=[turn] * 9)
        await its.until_free()
        assert await its.router.metric("kv_router_sessions") == 4.0
        final = {"x-claude-code-session-id": "c0", "x-dynamo-session-final": "1"}
        await its.forward.complete(headers=final, prompt=[1] * 9)
        await its.until_free()
        assert await its.router.metric("kv_router_sessions") == 3.0


async def test_prompts_without_tokens_teach_no_predictions(scene):
    async with scene(ANSWERS) as its:
        assert (await its.forward.complete(prompt="Once upon a time")).status_code == 200
        assert (await its.forward.complete(prompt=[[1, 2], [3]])).status_code == 200
        await its.until_free()
        assert (await its.forward.complete()).status_code == 200
        await its.until_free()
        predictions = (await its.router.client.get("/predictions")).json()
        assert [group["requests"] for group in predictions["groups"]] == [1, 1]


# ── Faults ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "script",
    [
        hangs_up,
        says(b"garbage\r\n\r\n"),
        says(response(b"no", "500 Internal Server Error")),
        says(response(b"no", "429 Too Many Requests")),
        says(response(b"", "307 Temporary Redirect", "location: http://elsewhere/")),
        says(response(b"half", length=99), then_close=True),
        says(STREAM_HEAD, then_close=True),
        says(STREAM_HEAD, event({"error": {"message": "engine is dead"}})),
    ],
)
async def test_another_worker_serves_what_one_has_failed(scene, script):
    async with scene(script, ANSWERS) as its:
        answers = [await its.forward.complete(prompt=[n, 2, 3]) for n in range(6)]
        assert [answer.json() for answer in answers] == [ANSWER] * 6
        assert {answer.headers["x-worker-id"] for answer in answers} == {"2"}
        tried = {answer.headers["x-forward-attempts"] for answer in answers}
        assert "2" in tried or len(its.engines[1].requests) == 0
        await its.until_free()


async def test_all_workers_failed_is_no_worker_left(scene):
    async with scene(hangs_up, hangs_up) as its:
        answer = await its.forward.complete()
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "no_worker_left")
        assert "2 tried" in error["message"]
        await its.until_free()
        await its.forward.until_ended("failed")


async def test_the_last_refusal_is_the_answer(scene):
    refuses = says(response(b'{"e":1}', "429 Too Many Requests", "retry-after: 7"))
    async with scene(refuses) as its:
        answer = await its.forward.complete()
        assert (answer.status_code, answer.json()) == (429, {"e": 1})
        assert answer.headers["retry-after"] == "7"
        await its.until_free()


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable"])
async def test_the_clients_own_mistakes_are_tried_once(scene, status):
    async with scene(says(response(b'{"e":1}', status)), says(response(b'{"e":1}', status))) as its:
        answer = await its.forward.complete()
        assert answer.status_code == int(status[:3])
        assert answer.json() == {"e": 1}
        assert sum(len(each.requests) for each in its.engines.values()) == 1
        await its.until_free()


@pytest.mark.parametrize(
    ("said", "n"), [([piece("a")], 1), ([piece("a"), piece("b", finish_reason="stop")], 2)]
)
async def test_a_stream_that_breaks_off_says_so(scene, said, n):
    async with scene(says(STREAM_HEAD, *said, then_close=True)) as its:
        answer = await its.forward.complete(stream=True, n=n)
        first, *_, last = lines(answer.text)
        assert json.loads(first)["choices"][0]["text"] == "a"
        error = json.loads(last)["error"]
        assert error["code"] == "no_worker_left"
        assert its.engines[1].url not in error["message"]
        await its.until_free()
        await its.forward.until_ended("broke_off")


@pytest.mark.parametrize("ending", [[STREAM_END], []])
async def test_a_stream_that_is_finished_is_said_to_be_done(scene, ending):
    said = [STREAM_HEAD, piece("a"), piece("b", finish_reason="stop"), *ending]
    async with scene(says(*said, then_close=not ending)) as its:
        answer = await its.forward.complete(stream=True)
        assert lines(answer.text)[2:] == ["[DONE]"]
        await its.until_free()


async def test_unreadable_responses_pass_unchanged(scene):
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with scene(says(response(deep, "200 OK", JSON))) as its:
        answer = await its.forward.complete()
        assert (answer.status_code, answer.content) == (200, deep)
        await its.until_free()


async def test_engines_that_hang_are_given_up(scene):
    async with scene(hangs, first_byte_timeout_s=0.3) as its:
        assert (await its.forward.complete()).status_code == 502
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()


async def test_streams_that_fall_silent_are_given_up(scene):
    async def script(_, writer):
        writer.write(STREAM_HEAD + piece("a"))
        await hangs(_, writer)

    async with scene(script, idle_timeout_s=0.3) as its:
        answer = await its.forward.complete(stream=True)
        assert "error" in json.loads(lines(answer.text)[-1])
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()


async def test_bytes_that_trickle_are_a_stream_all_the_same(scene):
    async def script(_, writer):
        for each in STREAM_HEAD + piece("ä") + event(b"[DONE]") + STREAM_END:
            writer.write(bytes([each]))
            await asyncio.sleep(0)

    async with scene(script) as its:
        answer = await its.forward.complete(stream=True)
        assert json.loads(lines(answer.text)[0])["choices"][0]["text"] == "ä"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_vanishes_cancels_the_engines_work(scene, stream):
    async def script(_, writer):
        if stream:
            writer.write(STREAM_HEAD + piece("a"))
        await hangs(_, writer)

    async with scene(script) as its:
        body = json.dumps({**COMPLETION, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", its.forward.port)
        writer.write(post(body))
        await eventually(lambda: its.engines[1].requests)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()
        await its.forward.until_ended("client_gone")


async def test_a_client_that_reads_slowly_slows_the_engine_down(scene):
    written = []

    async def floods(_, writer):
        writer.write(STREAM_HEAD)
        while True:
            writer.write(piece("z" * 60_000))
            await writer.drain()
            written.append(1)

    async with scene(floods) as its:
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", its.forward.port, limit=1024)
        writer.write(post(body))
        await reader.readuntil(b"\r\n\r\n")
        before = await until_still(lambda: len(written))
        assert 0 < before < 2_000  # 120 MB, which no buffers hold
        writer.transport.abort()
        await its.until_free()


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, identity",
        b"content-length: -5",
        b"content-length : 5",
    ],
)
async def test_heads_that_two_would_read_differently_are_refused(scene, head):
    async with scene(ANSWERS) as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.forward.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n0\r\n\r\n{}"
        )
        assert b" 400 " in await reader.readline()
        writer.close()
        assert its.engines[1].requests == []


async def test_a_line_break_in_a_header_goes_nowhere(scene):
    async with scene(ANSWERS) as its:
        body = json.dumps(COMPLETION).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", its.forward.port)
        writer.write(post(body).replace(b"host: x", b"host: x\r\nx-a: 1\nx-worker-id: 9"))
        line = await reader.readline()
        writer.close()
        sent = [head.lower() for head, _ in its.engines[1].requests]
        assert b" 400 " in line or all("x-worker-id" not in head for head in sent)


# ── What is asked of it ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": {}}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, -1], "stream": True}, 400, "prompt"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1], "model": 5}, 400, "model"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [1], "stream": 3}, 400, "stream"),
        ("/v1/images/generations", {}, 404, None),
    ],
)
async def test_unsupported_request_is_refused_as_openai_does(scene, path, body, status, param):
    async with scene(ANSWERS) as its:
        answer = await its.forward.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param)
        assert error["message"]
        assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
        assert its.engines[1].requests == []


async def test_other_methods_are_refused_and_the_right_ones_named(scene):
    async with scene() as its:
        client = its.forward.client
        for path, allowed in (("/v1/completions", "POST"), ("/v1/models", "GET, HEAD")):
            for method in ("PUT", "OPTIONS"):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
                assert answer.json()["error"]["code"] == "method_not_allowed"
        answer = await client.head("/health")
        assert (answer.status_code, answer.content) == (200, b"")
        assert (await client.get("/health")).status_code == 200


async def test_one_model_is_described_and_an_unknown_one_is_404(scene):
    async with scene(ANSWERS) as its:
        client = its.forward.client
        await its.router.worker(2, endpoint=its.engines[1].url, model_name="org/tiny")
        for name in ("default", "org/tiny"):
            answer = await client.get(f"/v1/models/{name}")
            assert (answer.status_code, answer.json()["id"]) == (200, name)
        answer = await client.get("/v1/models/unknown")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.delete("/v1/models/default")).status_code == 405


async def test_head_of_the_root_is_200(scene):
    """Coding agents ask for it at their start."""
    async with scene() as its:
        answer = await its.forward.client.head("/")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_unknown_model_is_404(scene):
    async with scene() as its:
        assert (await its.forward.complete()).status_code == 503  # no worker is there at all
    async with scene(ANSWERS) as its:  # a worker that joined after the last look
        answer = await its.forward.complete(model="unknown")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "default" in answer.json()["error"]["message"]
        await its.router.worker(2, endpoint=its.engines[1].url, model_name="unknown")
        assert (await its.forward.complete(model="unknown")).status_code == 200


async def test_a_worker_that_is_named_is_taken_and_no_other(scene):
    async with scene(ANSWERS, hangs_up, mode="direct") as its:
        for header in ("x-worker-id", "x-worker-instance-id"):
            assert (await its.forward.complete(headers={header: "1"})).status_code == 200
            assert (await its.forward.complete(headers={header: "2"})).status_code == 502
        named = {"backend_instance_id": 1}
        assert (await its.forward.complete(nvext=named)).headers["x-worker-id"] == "1"
        assert "nvext" not in its.asked(1)[-1]
        assert (await its.forward.complete(headers={"x-worker-id": "99"})).status_code == 503
        unnamed = await its.forward.complete()
        assert unnamed.json()["error"]["code"] == "no_worker_named"
        await its.until_free()


async def test_query_returns_the_placement_and_sends_nothing(scene):
    async with scene(ANSWERS) as its:
        asked = {"annotations": ["query_instance_id"]}
        answer = (await its.forward.complete(nvext=asked)).json()
        assert answer["choices"] == []
        assert answer["nvext"] == {
            "worker_id": {"decode_worker_id": 1, "decode_dp_rank": 0},
            "overlap_blocks": 0,
            "token_ids": COMPLETION["prompt"],
        }
        assert its.engines[1].requests == []
        assert await its.active_requests() == 0
        both = {"backend_instance_id": 1, "token_data": answer["nvext"]["token_ids"]}
        assert (await its.forward.complete(prompt="text", nvext=both)).status_code == 200


async def test_latency_and_output_are_counted_by_model_status_and_worker(scene):
    async with scene(ANSWERS, hangs_up, mode="direct") as its:
        for worker, status in (("1", 200), ("2", 502)):
            answer = await its.forward.complete(headers={"x-worker-id": worker})
            assert answer.status_code == status
        page = (await its.forward.client.get("/metrics")).text
        counted = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
        prefix = "kv_router_forward_"
        for worker, status in (("1", "200"), ("2", "failed")):
            labels = f'{{status="{status}",worker_id="{worker}"}}'
            assert counted[f"{prefix}worker_attempts_total{labels}"] == "1.0"
            assert float(counted[f"{prefix}worker_seconds_total{labels}"]) > 0
            of_model = f'{{model="default",status="{status}"}}'
            assert counted[f"{prefix}attempt_seconds_count{of_model}"] == "1.0"
        assert float(counted[f'{prefix}output_tokens_total{{model="default"}}']) > 0


async def test_models_probes_and_metrics(scene):
    async with scene(ANSWERS) as its:
        client = its.forward.client
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["default"]
        await eventually(its.forward.is_ready)
        assert (await client.get("/ready")).json() == {"ready": True, "reason": None}
        asked = await its.router.metric(LOADS_ASKED)
        for _ in range(20):
            await client.get("/ready")
        assert await its.router.metric(LOADS_ASKED) <= asked + 1  # its list is refreshed meanwhile
        assert "kv_router_forward_in_flight 1.0" in (await client.get("/metrics")).text


async def test_without_a_router_completions_are_503():
    async with RunningForward(f"http://127.0.0.1:{free_port()}").running() as forward:
        unready = await forward.client.get("/ready")
        assert unready.status_code == 503
        assert "router" in unready.json()["reason"]
        answer = await forward.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unanswered")
        assert all("127.0.0.1" not in said.text for said in (unready, answer))


async def test_without_workers_placement_is_retried(nats_server, monkeypatch):
    """A router that has just begun knows no worker yet."""
    monkeypatch.setattr("router.forward.resilience.booking.UNHEARD_S", (0.05,) * 4_000)
    refused = 'kv_router_refusals_total{code="no_endpoints",interface="http"}'
    async with (
        RunningRouter(nats_server.url).running() as router,
        RunningForward(str(router.client.base_url)).running() as forward,
        Upstream(ANSWERS).running() as engine,
    ):
        forward.client.timeout = 240.0
        asking = asyncio.create_task(forward.complete())
        await eventually(lambda: router.metric(refused))
        await router.worker(1, endpoint=engine.url)
        answer = await asking
        assert (answer.status_code, answer.json()) == (200, ANSWER)

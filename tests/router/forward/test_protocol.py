"""What comes on a client's connection, byte by byte."""

import asyncio
import gc
import json
from contextlib import asynccontextmanager

import pytest

from router.runtime.http_server.exchange import Exchange
from support.engines.upstreams import STREAM_END, STREAM_HEAD, chunk, event, hangs, response, says
from support.fleets.forwarding import COMPLETION, Scene, lines
from support.processes.servers import equals, eventually

ANSWER = {"id": "cmpl-1", "choices": []}
ANSWERS = says(response(json.dumps(ANSWER).encode()))
CHUNKED = "transfer-encoding: chunked"
BODY = json.dumps(COMPLETION).encode()
PATIENCE_S = 60.0


@asynccontextmanager
async def scene(nats_server, script=ANSWERS, **fields):
    async with Scene.of(nats_server.url, {1: script}, **fields) as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.forward.port)
        its.reader, its.writer = reader, writer
        yield its
        writer.close()


def request(
    body=BODY, *headers, path="/v1/completions", version="1.1", length=None, kind="application/json"
):
    length = len(body) if length is None else length
    said = [f"POST {path} HTTP/{version}", "host: x", f"content-type: {kind}", *headers]
    if length is not False:
        said.append(f"content-length: {length}")
    return "\r\n".join([*said, "", ""]).encode() + body


async def answer(its):
    """Status, headers and body of the next answer."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await its.reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await its.reader.readexactly(int(fields.get("content-length", 0)))
    return int(head.split()[1]), fields, body


async def test_requests_that_come_at_once_are_answered_in_order(nats_server):
    async with scene(nats_server) as its:
        models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        asked = (
            request(BODY, "x-request-id: a"),
            request(b"{", "x-request-id: b"),
            models,
            request(BODY, "x-request-id: c"),
        )
        its.writer.write(b"".join(asked))
        said = [await answer(its) for _ in asked]
        assert [status for status, _, _ in said] == [200, 400, 200, 200]
        assert [fields.get("x-request-id") for _, fields, _ in said] == ["a", "b", None, "c"]
        assert [json.loads(body) for _, _, body in said[::3]] == [ANSWER] * 2
        await its.until_free()


async def test_bytes_that_trickle_are_a_request_all_the_same(nats_server):
    async with scene(nats_server) as its:
        for each in request():
            its.writer.write(bytes([each]))
            await its.writer.drain()
        assert (await answer(its))[0] == 200


async def test_expect_100_continue_is_answered(nats_server):
    async with scene(nats_server) as its:
        whole = request(BODY, "expect: 100-continue")
        its.writer.write(whole[: -len(BODY)])
        assert (await answer(its))[0] == 100
        its.writer.write(BODY)
        assert (await answer(its))[0] == 200


@pytest.mark.parametrize("asked", [request(version="1.0"), request(BODY, "connection: close")])
async def test_connection_close_ends_the_connection(nats_server, asked):
    async with scene(nats_server) as its:
        its.writer.write(asked)
        status, fields, _ = await answer(its)
        assert (status, fields["connection"]) == (200, "close")
        assert await its.reader.read() == b""


@pytest.mark.parametrize("path", ["http://x/v1/completions?a=1", "/v1/%63ompletions"])
async def test_equivalent_paths_are_served(nats_server, path):
    async with scene(nats_server) as its:
        its.writer.write(request(path=path))
        assert (await answer(its))[0] == 200


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        (request(b"", length=10_000), 413, "body_too_large"),
        (request(b"", "expect: 100-continue", length=10**12), 413, "body_too_large"),
        (request(chunk(b"x" * 2000), CHUNKED, length=False), 413, "body_too_large"),
        (request(kind="text/plain"), 415, "unsupported_media_type"),
        (request().replace(b"content-type", b"x-type"), 415, "unsupported_media_type"),
        (request(BODY, "content-encoding: gzip"), 415, "unsupported_content_encoding"),
        (request(length=len(BODY) + 1), 408, "body_timeout"),
    ],
)
async def test_bodies_have_limits(nats_server, asked, status, code):
    async with scene(nats_server, body_limit_bytes=1024, body_timeout_s=0.3) as its:
        its.writer.write(asked)
        said, _, body = await answer(its)
        assert (said, json.loads(body)["error"]["code"]) == (status, code)
        assert its.engines[1].requests == []
        await its.forward.until_ended("refused")


async def test_bodies_together_have_a_limit(nats_server):
    """Unfinished bodies of one client do not exhaust the memory."""
    async with scene(nats_server, bodies_limit_bytes=2048) as its:
        held = "kv_router_forward_body_bytes"
        its.writer.write(request(b" " * 2040, length=4096))
        await eventually(lambda: equals(its.forward.metric(held), 2040))
        answer = await its.forward.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "too_much_at_once"
        its.writer.close()
        await eventually(lambda: equals(its.forward.metric(held), 0))
        calls = [each for each in gc.get_objects() if type(each) is Exchange]
        assert not any(each.received for each in calls), "kept until garbage is collected"
        assert (await its.forward.complete()).status_code == 200
        await eventually(lambda: equals(its.forward.metric(held), 0))


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        (request(BODY, "content-length: 5"), 400, "malformed_request"),
        (request(BODY, "x-a: " + "a" * 40_000), 431, "headers_too_large"),
    ],
)
async def test_malformed_request_is_refused_in_openai_form(nats_server, asked, status, code):
    async with scene(nats_server) as its:
        its.writer.write(asked)
        said, _, body = await answer(its)
        error = json.loads(body)["error"]
        assert (said, error["code"], error["type"]) == (status, code, "invalid_request_error")


async def test_trailers_name_no_worker_and_go_nowhere(nats_server):
    async with scene(nats_server) as its:
        trailers = b"x-worker-id: 99\r\nx-late: 1\r\nauthorization: x\r\n\r\n"
        its.writer.write(request(chunk(BODY) + b"0\r\n" + trailers, CHUNKED, length=False))
        assert (await answer(its))[0] == 200
        assert all(name not in its.engines[1].requests[0][0] for name in ("x-late", "authoriz"))


async def test_http_1_0_client_gets_a_stream_without_chunks(nats_server):
    said = event({"choices": [{"index": 0, "text": "a"}]}) + event(b"[DONE]")
    async with scene(nats_server, says(STREAM_HEAD, said, STREAM_END)) as its:
        its.writer.write(
            request(json.dumps({**COMPLETION, "stream": True}).encode(), version="1.0")
        )
        head, _, body = (await its.reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert len(lines(body.decode())) == 2
        assert body.startswith(b"data: ")


@pytest.mark.parametrize("before", [0, 3])
async def test_half_closed_client_is_answered(nats_server, before):
    go_on = asyncio.Event()

    async def script(upstream, writer):
        await go_on.wait()
        await ANSWERS(upstream, writer)

    async with scene(nats_server, script) as its:
        go_on.set()
        for _ in range(before):  # then its head is known
            its.writer.write(request())
            assert (await answer(its))[0] == 200
        go_on.clear()
        its.writer.write(request())
        its.writer.write_eof()
        assert (await answer(its))[0] == 100  # are you there?
        go_on.set()
        rest = (await its.reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert rest.startswith(b"HTTP/1.1 200")
        assert json.loads(rest.partition(b"\r\n\r\n")[2]) == ANSWER
        await its.until_free()


@pytest.mark.parametrize("before", [0, 3])
async def test_closed_client_cancels_the_engines_request(nats_server, before):
    async def script(upstream, writer):
        await (ANSWERS if len(upstream.requests) <= before else hangs)(upstream, writer)

    async with scene(nats_server, script) as its:
        for _ in range(before):
            its.writer.write(request())
            assert (await answer(its))[0] == 200
        its.writer.write(request())
        await eventually(lambda: len(its.engines[1].requests) > before)
        its.writer.close()
        await eventually(lambda: its.engines[1].gone == 1)
        await its.until_free()


async def test_a_client_that_vanishes_before_its_request_is_whole_is_forgotten(nats_server):
    async with scene(nats_server) as its:
        its.writer.write(request(length=len(BODY) + 1))
        its.writer.close()
        await its.forward.until_ended("client_gone")


def completion(number, *headers, length=None, **kinds):
    body = json.dumps({**COMPLETION, "prompt": [*range(1, number + 1)]}).encode()
    return request(body, *headers, length=length, **kinds)


def written(prompt):
    body = json.dumps({**COMPLETION, "prompt": "?"}).encode()
    return request(body.replace(b'"?"', prompt))


async def test_requests_under_a_head_that_came_before_are_answered_as_the_first(nats_server):
    """By their own prompts and ids; in one piece, in two, and behind one another."""
    async with scene(nats_server) as its:
        for number in range(1, 6):
            its.writer.write(completion(number, f"x-request-id: {number}"))
            status, fields, body = await answer(its)
            assert (status, fields["x-request-id"]) == (200, str(number))
            assert json.loads(body) == ANSWER
        its.writer.write(completion(6, "x-request-id: 6")[:-5])
        await its.writer.drain()
        its.writer.write(completion(6, "x-request-id: 6")[-5:] + completion(7, "x-request-id: 7"))
        ids = [(await answer(its))[1]["x-request-id"] for _ in range(2)]
        assert ids == ["6", "7"]
        prompts = [[*range(1, number + 1)] for number in range(1, 8)]
        assert [asked["prompt"] for asked in its.asked(1)] == prompts
        heads = [head.lower() for head, _ in its.engines[1].requests]
        assert all(f"x-request-id: {number + 1}\r\n" in head for number, head in enumerate(heads))
        await its.until_free()


@pytest.mark.parametrize(
    "second",
    [
        completion(3, "content-encoding: gzip"),
        completion(3, kind="text/plain"),
        written(b'[1, "x, 3]'),
        written(b"[1, -2, 3]"),
        written(b"[1, , 3]"),
        written(b"[]"),
    ],
)
async def test_cached_head_does_not_hide_errors(nats_server, second):
    async with scene(nats_server) as its:
        for number in (1, 2, 3):
            its.writer.write(completion(number))
            assert (await answer(its))[0] == 200
        its.writer.write(second)
        status, _, body = await answer(its)
        assert status in (400, 415)
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert len(its.asked(1)) == 3
        await its.until_free()


async def test_a_long_body_is_refused_under_a_head_that_came_before(nats_server):
    async with scene(nats_server, body_limit_bytes=1024) as its:
        for number in (1, 2, 3):
            its.writer.write(completion(number))
            assert (await answer(its))[0] == 200
        its.writer.write(completion(1_000))
        assert (await answer(its))[0] == 413
        assert len(its.asked(1)) == 3


async def test_nothing_is_left_of_a_connection_that_was_kept(nats_server):
    def answering():
        return [each for each in asyncio.all_tasks() if "_answer_all" in repr(each.get_coro())]

    async with scene(nats_server) as its:
        for number in (1, 2, 3):
            its.writer.write(completion(number))
            assert (await answer(its))[0] == 200
            assert len(answering()) == 1
        its.writer.close()
        await eventually(lambda: not answering())

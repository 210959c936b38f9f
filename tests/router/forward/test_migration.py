"""Streams that go on elsewhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.migration import continuation, is_migratable
from router.forward.request_body import read_completion_request
from router.forward.stream_state import StreamState, Wanted
from support.engines.upstreams import STREAM_END, STREAM_HEAD, event, response, says
from support.fleets.forwarding import COMPLETION, Scene, lines
from support.processes.servers import eventually

PROMPT = COMPLETION["prompt"]


def asked(path=COMPLETIONS, **fields):
    base = {"messages": [{}]} if path == CHAT else {"prompt": PROMPT}
    return read_completion_request(path, json.dumps({"stream": True, **base, **fields}).encode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({}, True),
        ({"n": 1, "temperature": 0.5, "stop": ["x"], "logprobs": None, "tools": []}, True),
        ({"stream": False}, False),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"tools": [{"type": "function"}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_stateful_requests_are_not_migrated(path, fields, may):
    assert is_migratable(asked(path, **fields)) == may


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_several_prompts_are_not_migrated(prompt):
    assert not is_migratable(asked(prompt=prompt))


def test_the_rest_is_asked_for_behind_what_was_generated():
    fields = {"max_tokens": 10, "min_tokens": 4, "temperature": 0.5, "nvext": {}}
    sent = json.loads(continuation(asked(**fields), PROMPT, [7, 8, 9]))
    assert sent["prompt"] == [*PROMPT, 7, 8, 9]
    assert (sent["max_tokens"], sent["min_tokens"], sent["temperature"]) == (7, 1, 0.5)
    chat = json.loads(continuation(asked(CHAT, max_completion_tokens=5), PROMPT, [7]))
    assert chat["prompt"] == [*PROMPT, 7]
    assert chat["max_tokens"] == 4
    assert "messages" not in chat
    assert json.loads(continuation(asked(CHAT), PROMPT, [7]))["max_tokens"] is None
    assert json.loads(continuation(asked(), PROMPT, [7]))["max_tokens"] == 15


def chunk_of(number, *, is_chat=False, **fields):
    said = {"delta": {"content": f"{number} "}} if is_chat else {"text": f"{number} "}
    choice = {"index": 0, **said, "finish_reason": None, "token_ids": [number], **fields}
    return {"id": f"of-{number}", "created": number, "choices": [choice]}


@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_a_stream_of_two_engines_is_seen_as_one(first, second, is_chat):
    state = StreamState(Wanted(usage=True))
    shown = b""
    for number in range(first):
        first_id = {"id": "of-0", "created": 0}
        shown += state.take(_bytes(chunk_of(number, is_chat=is_chat) | first_id))[0]
    state.go_on(state.before(is_chat=is_chat))
    for number in range(first, first + second):
        shown += state.take(_bytes(chunk_of(number)))[0]
    usage = {
        "prompt_tokens": 5 + first,
        "completion_tokens": second,
        "total_tokens": 5 + first + second,
    }
    shown += state.take(_bytes({"id": "z", "choices": [], "usage": usage}))[0]
    *chunks, last = [json.loads(line) for line in lines(shown.decode())]
    assert {chunk["id"] for chunk in chunks} == {"of-0"}
    assert {chunk["created"] for chunk in chunks} == {0}
    texts = [
        choice["delta"]["content"] if is_chat else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert texts == [f"{number} " for number in range(first + second)]
    assert state.token_ids == list(range(first + second))
    whole = {"prompt_tokens": 5, "completion_tokens": first + second}
    assert last["usage"] == {**usage, **whole}


def _bytes(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def streams(numbers, *, ends):
    last = [event(b"[DONE]"), STREAM_END] if ends else []
    return says(STREAM_HEAD, *(event(chunk_of(n)) for n in numbers), *last, then_close=not ends)


def scene(nats_server, *scripts, **fields):
    return Scene.of(nats_server.url, dict(enumerate(scripts, 1)), **fields)


async def texts_of(its, **fields):
    answer = await its.forward.complete(stream=True, **fields)
    said = [json.loads(line) for line in lines(answer.text) if line != "[DONE]"]
    return [c["text"] for each in said for c in each.get("choices", [{"text": each}])]


def by_prompt(_, body):
    return len(json.loads(body)["prompt"]) - len(PROMPT)


async def breaks_once(upstream, writer):
    """Two tokens, then the connection; of a prompt that goes on, the rest."""
    done = by_prompt(*upstream.requests[-1])
    most = json.loads(upstream.requests[-1][1])["max_tokens"]
    numbers = range(done, done + (most if done else 2))
    await streams(numbers, ends=bool(done))(upstream, writer)


async def test_the_client_sees_one_stream_where_a_worker_died_in_the_middle(nats_server):
    async with scene(nats_server, breaks_once, breaks_once) as its:
        assert await texts_of(its, max_tokens=6) == [f"{n} " for n in range(6)]
        (first,), (second,) = (its.asked(worker_id) for worker_id in (1, 2))
        longer, shorter = sorted((first, second), key=lambda body: -len(body["prompt"]))
        assert longer["prompt"] == [*shorter["prompt"], 0, 1]
        moved = 'kv_router_forward_migrations_total{outcome="moved"}'
        assert await its.forward.metric(moved) == 1
        await its.until_free()


async def test_last_piece_of_a_broken_stream_is_sent_once(nats_server):
    """Two tokens, and in the same bytes that the engine cannot go on."""

    async def script(upstream, writer):
        body = json.loads(upstream.requests[-1][1])
        done = by_prompt(*upstream.requests[-1])
        if done:
            await streams(range(done, done + body["max_tokens"]), ends=True)(upstream, writer)
            return
        said = [event(chunk_of(n)) for n in range(2)]
        writer.write(STREAM_HEAD + b"".join(said) + event({"error": {"message": "dead"}}))

    async with scene(nats_server, script, script) as its:
        assert await texts_of(its, max_tokens=6) == [f"{n} " for n in range(6)]
        await its.until_free()


async def test_stream_with_all_tokens_is_not_migrated(nats_server):
    async with scene(nats_server, streams(range(4), ends=False)) as its:
        *texts, end = await texts_of(its)
        assert (texts, end) == ([f"{n} " for n in range(4)], "")
        await its.until_free()
        await its.forward.until_ended("answered")


async def test_migrations_are_bounded(nats_server):
    endless = streams(range(2), ends=False)
    async with scene(nats_server, endless, endless, endless, max_migrations=1) as its:
        *_, last = await texts_of(its, max_tokens=64)
        assert last["error"]["code"] == "no_worker_left"
        assert sum(len(engine.requests) for engine in its.engines.values()) == 2
        await its.until_free()


async def test_without_token_ids_a_stream_stays_broken(nats_server):
    async def untold(upstream, writer):
        chunk = {"id": "x", "choices": [{"index": 0, "text": "a"}]}
        await says(STREAM_HEAD, event(chunk), then_close=True)(upstream, writer)

    async with scene(nats_server, untold, untold) as its:
        *_, last = await texts_of(its, max_tokens=64)
        assert last["error"]["code"] == "no_worker_left"
        await its.until_free()


async def test_failing_worker_is_ejected_until_it_answers_a_probe(nats_server):
    is_well = []

    async def script(upstream, writer):
        head, _ = upstream.requests[-1]
        if is_well:
            writer.write(response(b'{"choices": []}', "200 OK", "content-type: application/json"))
        elif head.startswith("GET /health"):
            writer.write(response(b"", "503 Unavailable"))
        else:
            writer.close()

    good = says(response(b'{"choices": []}', "200 OK", "content-type: application/json"))
    ejected = "kv_router_forward_ejected_workers"
    options = {"breaker_failures": 1, "breaker_open_s": 0.1}
    async with scene(nats_server, script, good, **options) as its:

        async def is_ejected(expected):
            await its.forward.complete()
            return await its.forward.metric(ejected) == expected

        await eventually(lambda: is_ejected(1))
        is_well.append(True)
        await eventually(lambda: is_ejected(0))
        await its.until_free()

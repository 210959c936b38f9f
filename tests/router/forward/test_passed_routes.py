"""Requests that pass byte for byte: embeddings, reranking, scores, audio, tokens."""

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.forward.apis.forms import MOST_FIELDS, form_fields
from router.forward.apis.passed import PASSED, says_it_is_missing
from router.forward.passing import (
    FORGOTTEN_S,
    MOST_MISSING,
    MOST_RATES,
    MOST_TOKENS,
    BodySizes,
    MissingRoutes,
)
from router.forward.request_body import read_passed_request
from router.protocol.requests import Usage
from support.engines.upstreams import STREAM_END, STREAM_HEAD, hangs, response, says
from support.fleets.forwarding import Scene
from support.processes.servers import eventually
from support.values.token_files import token_lines, token_of

JSON = "content-type: application/json"
MISSING = says(response(b'{"detail":"Not Found"}', "404 Not Found", JSON))
FORMS = [path for path, route in PASSED.items() if route.is_form]
OTHERS = [path for path, route in PASSED.items() if not route.is_form]
ADMINISTRATION = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/invocations",
    "/reset_prefix_cache",
    "/server_info",
    "/update_weights_from_disk",
    "/flush_cache",
    "/generate",
    "/start_profile",
    "/pause",
    "/v1/realtime",
    "/v1/chat/completions/render",
    "/inference/v1/generate",
    "/v1//embeddings",
    "/v1/embeddings/",
    "/V1/embeddings",
    "/v1/%65mbeddings/../load_lora_adapter",
    "/metrics/../sleep",
]


def answers(**fields):
    body = b'{ "data": [], "usage":{"prompt_tokens":7, "total_tokens":7}, "odd": "\xc3\xa9" }'
    return says(response(fields.get("body", body), "200 OK", JSON, "x-engine: 1"))


@pytest.fixture
def scene(nats_server):
    def of(*scripts, **fields):
        return Scene.of(nats_server.url, dict(enumerate(scripts, 1)), **fields)

    return of


async def is_asked(its):
    return bool(its.engines[1].requests)


def sent_to(its, worker_id):
    return [(head.split(" ")[1], body) for head, body in its.engines[worker_id].requests if body]


async def test_request_and_answer_pass_byte_for_byte(scene):
    async with scene(answers()) as its:
        body = b'{ "model" : "default","input":["a", 1],\n "own_field": {"x": 1.50}}'
        headers = {"content-type": "application/json", "x-mine": "1"}
        for path in OTHERS:
            answer = await its.forward.client.post(path, content=body, headers=headers)
            assert answer.content.endswith(b'"odd": "\xc3\xa9" }')
            assert (answer.status_code, answer.headers["x-engine"]) == (200, "1")
            assert answer.headers["x-worker-id"] == "1"
            assert sent_to(its, 1)[-1] == (path, body)
            assert "x-mine: 1" in its.engines[1].requests[-1][0]
            await its.forward.until_ended("answered", f"POST {path}")
        await its.until_free()


async def test_form_passes_with_its_file(scene):
    sound = bytes(range(256)) * 3000
    fields = {"model": "default", "response_format": "json"}
    async with scene(answers()) as its:
        for path in FORMS:
            files = {"file": ("a.wav", sound, "audio/wav")}
            answer = await its.forward.client.post(path, data=fields, files=files)
            assert answer.status_code == 200, answer.text
            sent_path, body = sent_to(its, 1)[-1]
            assert sent_path == path
            assert sound in body
            head = its.engines[1].requests[-1][0]
            kind = next(line for line in head.split("\r\n") if line.startswith("content-type:"))
            read = form_fields(kind.partition(":")[2].strip().encode(), body)
            assert {name: bytes(value) for name, value in read.items()} == {
                "model": b'"default"',
                "response_format": b'"json"',
                "file": b"null",
            }
        await its.until_free()


async def test_stream_of_a_transcript_passes_byte_for_byte(scene):
    events = [b'data: {"delta": "x"}\r\n\r\n', b": note\n\n", b"data: [DO", b"NE]\n\n", b"tail"]
    chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events]
    async with scene(says(STREAM_HEAD, *chunks, STREAM_END)) as its:
        files = {"model": (None, "default"), "file": ("a", b"x"), "stream": (None, "true")}
        answer = await its.forward.client.post("/v1/audio/transcriptions", files=files)
        assert answer.content == b"".join(events)
        assert answer.headers["content-type"] == "text/event-stream"
        await its.until_free()


async def test_worker_without_the_route_is_learned_and_another_one_serves(scene):
    async with scene(MISSING, answers()) as its:
        body = {"model": "default", "input": "x"}
        for _ in range(6):
            answer = await its.forward.post("/v1/embeddings", body)
            assert answer.headers["x-worker-id"] == "2"
            assert answer.headers["x-forward-attempts"] == "1"
        assert len(sent_to(its, 1)) <= 1
        await its.until_free()
        assert (await its.forward.post("/score", body)).headers["x-worker-id"] == "2"


async def test_route_that_no_worker_has_is_refused_in_the_words_of_the_api(scene):
    async with scene(MISSING, MISSING) as its:
        for _ in range(2):
            answer = await its.forward.post("/v1/rerank", {"model": "default", "query": "x"})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("route_not_served", "invalid_request_error")
            assert "/v1/rerank is served by no worker of model 'default'" in error["message"]
        assert [len(sent_to(its, n)) for n in (1, 2)] == [1, 1]
        await its.until_free()
        unknown = await its.forward.post("/v1/rerank", {"model": "other", "query": "x"})
        assert unknown.json()["error"]["code"] == "model_not_found"


async def test_refusal_of_an_engine_is_passed_on(scene):
    said = b'{"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}'
    async with scene(says(response(said, "404 Not Found", JSON))) as its:
        for _ in range(2):
            answer = await its.forward.post("/v1/embeddings", {"input": "x"})
            assert (answer.status_code, answer.content) == (404, said)
        assert len(sent_to(its, 1)) == 2


async def test_failed_worker_is_replaced_and_the_booking_freed(scene):
    async with scene(says(response(b"no", "503 Service Unavailable")), answers()) as its:
        for _ in range(4):
            answer = await its.forward.post("/v1/embeddings", {"input": "x"})
            assert (answer.status_code, answer.headers["x-worker-id"]) == (200, "2")
        await its.until_free()


async def test_client_that_vanishes_frees_its_booking(scene):
    async with scene(hangs) as its:
        body = {"model": "default", "input": "x" * 4000}
        asking = asyncio.create_task(its.forward.post("/v1/embeddings", body))
        await eventually(lambda: is_asked(its))
        loads = (await its.router.client.get("/loads")).json()
        (rank,) = loads[0]["loads"]
        assert rank["active_requests"] == 1
        assert 900 < rank["potential_prefill_tokens"] < 1200
        asking.cancel()
        await its.until_free()
        await its.forward.until_ended("client_gone", "POST /v1/embeddings")


async def test_route_outside_the_table_reaches_no_engine(scene):
    async with scene(answers()) as its:
        for path in ADMINISTRATION:
            for method in ("POST", "GET"):
                url = httpx.URL(its.forward.url).copy_with(raw_path=path.encode())
                answer = await its.forward.client.request(method, url, json={"model": "default"})
                assert answer.status_code == 404
                assert "/v1/embeddings" in answer.json()["error"]["message"]
        assert its.engines[1].requests == []


async def test_each_route_needs_the_scope_before_its_body_is_read(scene, tmp_path):
    tokens = tmp_path / "tokens"
    lines = token_lines("user", "route", tenant="t"), token_lines("meter", "metrics")
    tokens.write_text("".join(lines))
    async with scene(answers(), token_file=str(tokens)) as its:
        for path in PASSED:
            for name, status in ((None, 401), ("meter", 403)):
                headers = {} if name is None else {"authorization": f"Bearer {token_of(name)}"}
                answer = await its.forward.client.post(path, content=b"{", headers=headers)
                assert answer.status_code == status, path
        assert its.engines[1].requests == []
        headers = {"authorization": f"Bearer {token_of('user')}"}
        salted = {"input": "x", "cache_salt": "t"}
        refused = await its.forward.post("/v1/embeddings", {"input": "x"}, headers=headers)
        assert refused.status_code == 403
        body = {**salted, "odd": 1}
        answer = await its.forward.post("/v1/embeddings", body, headers=headers)
        assert (answer.status_code, answer.headers["x-dropped-fields"][0]) == (200, "1"), (
            answer.text
        )
        assert its.asked(1) == [salted]
        refused = await its.forward.post("/tokenize", {"priority": 1}, headers=headers)
        assert refused.json()["error"]["code"] == "steering_refused"
        for field in ("vllm_xargs", "odd"):
            files = {"model": (None, "default"), field: (None, "1")}
            path = "/v1/audio/transcriptions"
            refused = await its.forward.client.post(path, files=files, headers=headers)
            assert refused.json()["error"]["param"] == field, refused.text
        assert len(sent_to(its, 1)) == 1


FORM_OF_X = "multipart/form-data; boundary=x"
INVALID = [
    ("/v1/embeddings", "application/json", b"{", 400),
    ("/v1/embeddings", "application/json", b"[]", 400),
    ("/v1/embeddings", "application/json", b'{"model": 7}', 400),
    ("/v1/embeddings", FORM_OF_X, b"--x--", 415),
    ("/v1/embeddings", "text/plain", b"{}", 415),
    ("/v1/audio/transcriptions", "application/json", b"{}", 415),
    ("/v1/audio/transcriptions", "multipart/form-data", b"x", 400),
    ("/v1/audio/transcriptions", FORM_OF_X, b"nonsense", 400),
    ("/v1/audio/transcriptions", FORM_OF_X, b"--x--\r\n", 400),
]


async def test_invalid_request_is_refused_here(scene):
    async with scene(answers()) as its:
        for path, kind, body, status in INVALID:
            headers = {"content-type": kind}
            answer = await its.forward.client.post(path, content=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert its.engines[1].requests == []


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────


def form(*parts, boundary=b"b"):
    head = b'content-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    lines = [b"--" + boundary + b"\r\n" + head % part for part in parts]
    return b"".join(lines) + b"--" + boundary + b"--\r\n"


def read_form(body):
    return form_fields(b"multipart/form-data; boundary=b", body)


def test_fields_of_forms_are_read_by_name():
    body = form(
        (b"model", b"", b"m"),
        (b"file", b'; filename="a"', b"x" * 9999),
        (b"long", b"", b"y" * 9999),
    )
    read = {name: bytes(value) for name, value in read_form(body).items()}
    assert read == {"model": b'"m"', "file": b"null", "long": b"null"}


@pytest.mark.parametrize(
    "body",
    [
        form((b"model", b"", b"a"), (b"model", b"", b"b")),
        form((b"", b"", b"a")),
        form(*[(b"f%d" % index, b"", b"") for index in range(MOST_FIELDS + 1)]),
        b"--b\r\n\r\nx\r\n--b--\r\n",
    ],
)
def test_ambiguous_form_is_refused(body):
    with pytest.raises(InvalidFieldError):
        read_form(body)


@given(st.binary(max_size=60), st.binary(max_size=200), st.integers(0, 150))
def test_no_form_makes_the_reader_fail_otherwise(kind, noise, at):
    body = form((b"model", b"", b"m"), (b"file", b'; filename="a"', b"xyz"))
    for content_type in (b"multipart/form-data; boundary=b", b"multipart/form-data;" + kind):
        try:
            read = form_fields(content_type, body[:at] + noise + body[at:])
        except InvalidFieldError:
            continue
        assert all(isinstance(name, str) and name for name in read)


def test_missing_routes_are_forgotten_and_bounded():
    missing = MissingRoutes()
    missing.note("m", "/a", 1, 0.0)
    missing.note("m", "/b", 2, 1.0)
    assert missing.workers("m", "/a", 1.0) == {1}
    assert missing.workers("other", "/a", 1.0) == set()
    assert missing.workers("m", "/a", FORGOTTEN_S) == set()
    assert missing.workers("m", "/b", FORGOTTEN_S) == {2}
    for worker_id in range(2 * MOST_MISSING):
        missing.note("m", "/a", worker_id, 2.0)
    assert len(missing) == MOST_MISSING


def test_sizes_are_learned_from_usage():
    sizes = BodySizes()
    asked = read_passed_request("/v1/embeddings", b'{"input": "' + b"x" * 389 + b'"}', b"")
    assert len(sizes.estimated(asked).token_ids) == 100
    assert not sizes.estimated(asked).are_certain
    for _ in range(40):
        sizes.note(asked, Usage(40))
    assert 39 <= len(sizes.estimated(asked).token_ids) <= 41
    big = read_passed_request("/v1/embeddings", b'{"input": "' + b"x" * 999_999 + b'"}', b"")
    assert len(BodySizes().estimated(big).token_ids) == MOST_TOKENS
    words = read_passed_request("/tokenize", b'{"prompt": "' + b"x" * 999 + b'"}', b"")
    assert len(sizes.estimated(words).token_ids) == 1
    for index in range(MOST_RATES + 9):
        sizes.note(read_passed_request("/score", b'{"model": "m%d"}' % index, b""), Usage(1))
    assert len(sizes) == MOST_RATES


@pytest.mark.parametrize(
    ("status", "body", "is_missing"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b'{"detail":"no such task"}', False),
        (404, b'{"error":{"message":"no model"}}', False),
        (404, b'{"detail":["Not Found"]}', False),
        (404, b"Not Found", False),
        (400, b'{"detail":"Not Found"}', False),
    ],
)
def test_a_missing_route_is_told_from_a_missing_model(status, body, is_missing):
    assert says_it_is_missing(status, body) == is_missing

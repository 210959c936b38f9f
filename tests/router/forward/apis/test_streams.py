"""What is read of streams that vLLM has sent, and errors in the format of each API."""

import json
from pathlib import Path

import msgspec
import pytest

from router.errors import InvalidFieldError, KvRouterError
from router.forward.apis.api import APIS, CHAT, COUNT_TOKENS, MESSAGES, RESPONSES
from router.forward.apis.event_stream import EngineErrorEvent, EventStream
from router.forward.apis.sse import EventSplitter
from router.forward.request_body import read_completion_request
from router.forward.stream_state import stream_of
from router.protocol.requests import Usage

FOLDER = Path(__file__).parents[3] / "vectors/vllm_http"
RECORDED = json.loads((FOLDER / "streams.json").read_text())["streams"]
EXCHANGES = json.loads((FOLDER / "exchanges.json").read_text())["exchanges"]
OF_EVENTS = [each for each in RECORDED if each["path"] in (MESSAGES, RESPONSES)]


def stream(path):
    return EventStream(APIS[path].event_of)


def taken(path, *events):
    """Tokens by event."""
    its = stream(path)
    return its, [its.take(event)[1] for event in events]


def named(**data):
    return b"event: x\ndata: " + json.dumps(data).encode() + b"\n\n"


@pytest.mark.parametrize("recorded", RECORDED, ids=[each["name"] for each in RECORDED])
def test_recorded_stream_begins_with_its_first_token_and_reports_usage(recorded):
    asked = read_completion_request(recorded["path"], json.dumps(recorded["body"]).encode())
    its = stream_of(asked, None)
    began_ms = None
    tokens = 0
    for at_ms, text in recorded["events"]:
        tokens += its.take(text.encode() + b"\n\n")[1]
        if its.has_first_token and began_ms is None:
            began_ms = at_ms
        assert its.has_first_token or not tokens
    usual_ms = {"responses": 33, "messages again: cached": 8}
    assert began_ms == usual_ms.get(recorded["name"], recorded["events"][0][0])
    assert its.is_finished
    assert its.is_done
    assert its.usage.prompt_tokens in (1701, 1720)
    cached = 1696 if recorded in OF_EVENTS else 0
    assert its.usage.cached == cached
    if recorded in OF_EVENTS:
        assert tokens == 3


@pytest.mark.parametrize("recorded", OF_EVENTS, ids=[each["name"] for each in OF_EVENTS])
def test_events_pass_byte_for_byte_whatever_their_line_ends_contain(recorded):
    its = stream(recorded["path"])
    for separator in ("\u2028", "\u2029", "\x85", "\x0b", "\x1c"):
        for _, text in recorded["events"]:
            event = text.replace("\ufffd", separator).encode() + b"\n\n"
            assert EventSplitter().feed(event) == [event]
            assert its.take(event)[0] == event
    assert its.is_done


def test_first_token_is_counted_once():
    content = named(type="content_block_start", index=0)
    delta = named(type="content_block_delta", index=0)
    start = named(type="message_start", message={"id": "msg_1", "usage": {"input_tokens": 4}})
    its, tokens = taken(MESSAGES, start, named(type="ping"), b": x\n\n", content, delta, delta)
    assert tokens == [0, 0, 0, 1, 0, 1]
    assert its.take(named(type="message_delta", usage={"output_tokens": 7}))[1] == 5
    assert its.usage == Usage(4)
    created = named(type="response.created", response={"id": "resp_1"})
    added, text = named(type="response.output_item.added"), named(type="response.x.delta")
    its, tokens = taken(RESPONSES, created, added, text, text)
    assert (tokens, its.answer_id) == ([0, 1, 0, 1], "resp_1")
    end = named(type="response.completed", response={"usage": {"input_tokens": 3}})
    its, tokens = taken(RESPONSES, created, end)
    assert (tokens, its.is_done, its.usage) == ([0, 1], True, Usage(3))


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_unreadable_event_passes_and_an_error_ends_the_stream(path):
    its = stream(path)
    for event in (b"event: x\ndata: {\n\n", b"data: a\ndata: b\n\n", named(type=5)):
        assert its.take(event) == (event, 0)
    assert not its.has_first_token
    with pytest.raises(EngineErrorEvent):
        its.take(named(type="error", error={"type": "api_error"}, message="gone"))


# ── Whole answers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "usage", "expected"),
    [
        (CHAT, {"prompt_tokens": 5}, Usage(5)),
        (RESPONSES, {"input_tokens": 5, "input_tokens_details": None}, Usage(5)),
        (
            RESPONSES,
            {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2}},
            Usage(5, 2),
        ),
        (MESSAGES, {"input_tokens": 5}, Usage(5)),
        (
            MESSAGES,
            {
                "input_tokens": 5,
                "cache_read_input_tokens": 64,
                "cache_creation_input_tokens": 32,
            },
            Usage(101, 64),
        ),
        (MESSAGES, {"output_tokens": 5}, None),
        (MESSAGES, {"input_tokens": -5}, None),
        (COUNT_TOKENS, {"input_tokens": 5}, None),
    ],
)
def test_usage_is_read_in_the_words_of_each_api(path, usage, expected):
    body = json.dumps({"id": "x", "usage": usage}).encode()
    assert APIS[path].reported(body).usage == expected
    assert APIS[path].reported(b"[").usage is None


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────


def of_engine(path, name):
    """An engine's recorded error, as clients of an API get it."""
    (exchange,) = (each for each in EXCHANGES if each["name"] == name)
    body = json.dumps(exchange["answer"]).encode()
    said = APIS[path].errors.of_engine(exchange["status"], body)
    return exchange["answer"], json.loads(said)


def test_error_of_the_own_format_is_unchanged():
    for path, name in (
        (MESSAGES, "messages: unknown model"),
        (RESPONSES, "responses: unknown previous response"),
    ):
        before, after = of_engine(path, name)
        assert before == after
    for api in APIS.values():
        for body in (b"gone", b"[1]", b'{"x": 1}'):
            assert api.errors.of_engine(500, body) == body


def test_validation_errors_of_messages_are_translated():
    before, after = of_engine(MESSAGES, "messages: invalid")
    message = before["error"]["message"]
    error = {"type": "invalid_request_error", "message": message}
    assert after == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, {"detail": "Not Found"}, "not_found_error"),
        (401, {"error": "Unauthorized"}, "authentication_error"),
        (500, {"error": {"message": "x"}}, "api_error"),
    ],
)
def test_errors_of_frameworks_are_translated(status, body, kind):
    said = json.loads(APIS[MESSAGES].errors.of_engine(status, json.dumps(body).encode()))
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    said = json.loads(APIS[RESPONSES].errors.of_engine(status, json.dumps(body).encode()))
    assert isinstance(said["error"]["message"], str)


@pytest.mark.parametrize("error", [InvalidFieldError("input", "x", "y"), KvRouterError("z")])
def test_own_errors_have_the_format_of_the_api(error):
    for api in APIS.values():
        status, body = api.errors.reply(error)
        said = msgspec.to_builtins(body)
        assert status == error.http_status
        assert said["error"]["code"] == error.code
        assert ("type" in said) == (api.path in (MESSAGES, COUNT_TOKENS))
        (event,) = EventSplitter().feed(api.errors.event(error))
        if api.event_of is not None:
            with pytest.raises(EngineErrorEvent):
                EventStream(api.event_of).take(event)

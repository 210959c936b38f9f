"""The OpenAI completions interface, without a server."""

import json

import msgspec
import pytest

from router.errors import InvalidFieldError
from worker_agent.reference.completions import AgentResponse, CompletionRequest, checked
from worker_agent.reference.engine.engine import Generated


def body(**fields):
    return msgspec.convert({"prompt": "hello", **fields}, CompletionRequest)


def test_text_becomes_bytes():
    made = checked(body(prompt="hé", max_tokens=3, cache_salt="t"), "m", 100, "id")
    assert (made.prompt, made.max_tokens, made.cache_salt) == (list("hé".encode()), 3, "t")


def test_token_ids_are_taken_as_they_are():
    assert checked(body(prompt=[1, 255]), "m", 100, "id").prompt == [1, 255]


@pytest.mark.parametrize(
    ("fields", "field", "status"),
    [
        ({"model": "other"}, "model", 404),
        ({"prompt": ""}, "prompt", 400),
        ({"prompt": []}, "prompt", 400),
        ({"max_tokens": 100}, "max_tokens", 400),
        ({"n": 2}, "n", 400),
        ({"best_of": 2}, "best_of", 400),
        ({"stop": ["x"]}, "stop", 400),
        ({"echo": True}, "echo", 400),
        ({"logprobs": 1}, "logprobs", 400),
    ],
)
def test_unsupported_option_is_refused(fields, field, status):
    with pytest.raises(InvalidFieldError) as caught:
        checked(body(**fields), "m", 100, "id")
    assert (caught.value.field, caught.value.http_status) == (field, status)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [256]}, {"prompt": [-1]}, {"prompt": 7}, {"prompt": ["a"]}, {"max_tokens": 0},
     {"temperature": -1}],
)  # fmt: skip
def test_wrong_types_and_ranges_are_refused(fields):
    with pytest.raises(msgspec.ValidationError):
        body(**fields)


def answered(tokens, **fields):
    asked = body(**fields)
    answer = AgentResponse(asked, checked(asked, "m", 1000, "id"), "m")
    events = [
        answer.add(Generated("id", token, 4, is_last=i == len(tokens) - 1))
        for i, token in enumerate(tokens)
    ]
    return answer, events


def test_completion_has_every_field():
    answer, _ = answered(list(b"ok"), return_token_ids=True)
    said = json.loads(answer.whole())
    choice = said["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
        "ok",
        [111, 107],
        "length",
    )
    assert said["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert said["object"] == "text_completion"


def chunks(events):
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_completion_stream_has_every_event():
    answer, events = answered(list(b"ok"), stream=True, stream_options={"include_usage": True})
    said = chunks(events)
    assert [chunk["choices"][0]["text"] for chunk in said] == ["o", "k"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None, "length"]
    usage, done = answer.end().strip().split(b"\n\n")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 2
    assert done == b"data: [DONE]"


def test_a_stream_without_usage_just_ends():
    answer, _ = answered(list(b"ok"), stream=True)
    assert answer.end() == b"data: [DONE]\n\n"


def test_characters_are_not_torn_apart():
    _, events = answered(list("é!".encode()), stream=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks(events)] == ["", "é", "!"]


def test_invalid_utf8_is_replaced():
    _, events = answered([0xC3], stream=True)
    assert chunks(events)[0]["choices"][0]["text"] == "�"

"""Words that came before mean what they meant, whatever prompt stands in them."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.errors import KvRouterError
from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.request_body import read_completion_request
from router.forward.request_templates import MOST_WORDS, read
from router.forward.stream_state import Wanted
from router.protocol.requests import SelectRequest
from router.protocol.values import UNREADABLE
from router.runtime.security.caller import ANYBODY, Caller

STREAM = {"stream_options": {"include_usage": True}, "return_token_ids": True}
FIELDS = {"model": "m", "max_tokens": 1, "stop": ["]", '"'], "stream": True}


def body_of(prompt, **fields):
    whole = {"model": "m", "prompt": prompt, **FIELDS, **fields}
    return json.dumps(whole, ensure_ascii=False).encode()


def knowing(*bodies, path=COMPLETIONS):
    known = []
    for body in bodies:
        read(path, body, known)
    return known


def seen(asked):
    prompt = asked.prompt if isinstance(asked.prompt, str) else asked.prompt.tolist()
    fields = {name: bytes(value) for name, value in asked.fields.items()}
    return asked.path, fields, bytes(asked.fields["prompt"]), asked.model, asked.max_tokens, prompt


@pytest.mark.parametrize(
    ("first", "prompt"),
    [
        ([1], [1, 2, 3]),
        ([1, 2], [4]),
        ("a", "b"),
        ("a", [5]),
        ([5], "ä word: {[,"),
        ("a" * 99, "b"),
    ],
)
def test_another_prompt_is_read_in_the_same_words(first, prompt):
    known = knowing(body_of(first))
    body = body_of(prompt)
    asked, words = read(COMPLETIONS, body, known)
    expected = read_completion_request(COMPLETIONS, body)
    assert (words, len(known)) == (known[0], 1)
    assert seen(asked) == seen(expected)
    assert words.wanted == Wanted.of(expected)
    for fields in ({}, {"stream_options": STREAM["stream_options"]}, STREAM, {}):
        assert words.to_engine(asked, **fields) == expected.to_engine(**fields)


@pytest.mark.parametrize(
    "body",
    [
        body_of([[1, 2], [3]]),
        body_of(["a", "b"]),
        body_of("a\\n"),
        body_of([1], nvext={"token_data": [1]}),
        b'{"prompt": [1], "prompt": [1]}',
        b'{"suffix": [1], "prompt": [1]}',
        b'{"prompt": [1], "x": "' + b"x" * 5_000 + b'"}',
    ],
)
def test_ambiguous_bodies_are_not_templates(body):
    assert knowing(body) == []
    assert knowing(json.dumps({"messages": [{}], "prompt": [1]}).encode(), path=CHAT) == []


def test_templates_are_kept_only_under_a_known_head():
    assert read(COMPLETIONS, body_of([1]), None)[1] is None


@pytest.mark.parametrize("prompt", ["[]", "[ 1]", "[[1]]", '["a"]', '""', "null", "7", "[1], 2]"])
def test_other_prompts_are_parsed_normally(prompt):
    body = body_of([1]).replace(b"[1]", prompt.encode())
    results = []
    for known in (None, knowing(body_of([1]))):
        try:
            results.append(seen(read(COMPLETIONS, body, known)[0]))
        except KvRouterError as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]


@settings(max_examples=300)
@example(0, b'"\xed\xa0\x80"')
@example(0, b'"\xff"')
@example(0, b'"a\n"')
@example(0, b'[1,"x]')
@given(st.sampled_from([0, 1]), st.binary(max_size=12))
def test_template_parse_equals_the_full_parse(kind, middle):
    """Or it is no tokens, which the router finds out."""
    whole = body_of([1]).replace(b"[1]", middle if kind == 0 else b"[7" + middle + b"]")
    asked, _ = None, None
    try:
        expected = seen(read_completion_request(COMPLETIONS, whole))
    except (KvRouterError, *UNREADABLE):
        expected = None
    try:
        asked, _ = read(COMPLETIONS, whole, knowing(body_of([1]), body_of("a")))
        got = seen(asked)
    except (KvRouterError, *UNREADABLE):
        got = None
    assert got == expected


def test_templates_are_bounded_and_the_latest_is_tried_first():
    known = knowing(*(body_of([1], seed=seed) for seed in range(MOST_WORDS + 2)))
    assert len(known) == MOST_WORDS
    assert known[0].prompt_in(body_of([2], seed=MOST_WORDS + 1)) == b"[2]"


def test_select_request_is_of_the_same_caller():
    words = knowing(body_of([1]))[0]
    assert words.request_of(ANYBODY) is None
    request = SelectRequest(token_ids=(), model_name="m", session_id="s")
    words.note_request(ANYBODY, request)
    assert words.request_of(ANYBODY) is request
    assert words.request_of(Caller("a", frozenset())) is None

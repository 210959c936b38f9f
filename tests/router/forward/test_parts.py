"""What is pure: events, headers, bodies, streams, targets."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.apis.sse import EventSplitter, EventTooLargeError, data_of
from router.forward.errors import NoWorkerNamedError
from router.forward.headers import own_headers, to_client, to_engine
from router.forward.placement import (
    TOKENS_AN_IMAGE,
    demanded_worker,
    estimated,
    named_prefill_worker,
    named_worker,
)
from router.forward.request_body import MOST_NAMES, MOST_PROMPTS, read_completion_request
from router.forward.stream_state import EngineErrorEvent, StreamState, Wanted
from router.protocol.replies import Decision, OverlapTokens, Trust, TrustState
from router.protocol.requests import RankTarget
from router.runtime.process.errors import MalformedBodyError

DECISION = Decision(
    model_name="m",
    routing_group="g",
    worker_id=7,
    dp_rank=1,
    endpoint="http://e",
    block_size=16,
    isl_tokens=40,
    overlap=OverlapTokens(32, 32, 0, 0, 0, {}),
    overlap_blocks=2,
    predicted_cached_blocks=2,
    effective_prefill_tokens=8,
    potential_decode_blocks=3,
    policy="predictive",
    trust=Trust(TrustState.EXACT, 1, 0.0),
)

LINES = st.text(alphabet="ab: {}", max_size=8).filter(bool)
EVENTS = st.lists(
    st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n"]))
)


@given(EVENTS, st.lists(st.integers(0, 200)), LINES)
def test_events_are_whole_however_they_come(events, cuts, rest):
    whole = [(end.join(lines) + end + end).encode() for lines, end in events]
    data = b"".join(whole) + rest.encode()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter = EventSplitter()
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == whole


def test_event_that_mixes_line_ends_is_divided_alike_in_one_piece_and_in_many():
    data = b"data: [DONE]\r\n\r\n\ndata: 1\n\n"
    whole, single = EventSplitter().feed(data), EventSplitter()
    assert [event for byte in data for event in single.feed(bytes([byte]))] == whole
    assert whole == [b"data: [DONE]\r\n\r\n", b"\ndata: 1\n\n"]


def test_chunk_with_names_that_are_no_text_is_passed_on_unchanged():
    event = b'data: {"\xcb":1,"choices":[{"token_ids":[1]}],"usage":{"prompt_tokens":1}}\n\n'
    state = StreamState(Wanted())
    assert state.take(event) == (event, 0)
    assert not state.has_all_tokens
    assert state.usage is None


def test_an_event_without_end_is_not_kept_for_ever():
    splitter = EventSplitter(limit_bytes=10)
    splitter.feed(b"data: 123")
    with pytest.raises(EventTooLargeError):
        splitter.feed(b"45")


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:x\r\n\r\n", b"x"),
        (b": ping\n\n", None),
        (b"event: a\ndata: b\n\n", None),
    ],
)
def test_events_are_parsed(event, data):
    assert data_of(event) == data


# ── Headers ──────────────────────────────────────────────────────────────────────────────────────


def test_hop_by_hop_and_own_headers_are_not_forwarded():
    pairs = [
        (b"host", b"router"),
        (b"connection", b"keep-alive, X-Secret"),
        (b"x-secret", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip"),
        (b"proxy-authorization", b"x"),
        (b"x-data-parallel-rank", b"9"),
        (b"x-worker-id", b"9"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer client"),
    ]
    kept = [(b"content-type", b"application/json"), (b"authorization", b"Bearer client")]
    ours = [(b"x-data-parallel-rank", b"1")]
    assert [*to_engine(tuple(pairs), 1, None)] == kept + ours
    assert [*to_engine(tuple(pairs), 1, b"")] == kept[:1] + ours
    token = [(b"authorization", b"Bearer engine")]
    assert [*to_engine(tuple(pairs), 1, b"Bearer engine")] == kept[:1] + token + ours
    assert own_headers("id") == ((b"x-request-id", b"id"),)


def test_response_headers_name_the_worker():
    pairs = [
        (b"content-type", b"x"),
        (b"content-length", b"1"),
        (b"date", b"d"),
        (b"x-worker-id", b"3"),
    ]
    assert to_client(pairs, DECISION, 2).split(b"\r\n") == [
        b"content-type: x",
        b"x-worker-id: 7",
        b"x-data-parallel-rank: 1",
        b"x-predicted-cached-tokens: 32",
        b"x-forward-attempts: 2",
        b"",
    ]


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────


def asked(path=COMPLETIONS, **fields):
    return read_completion_request(path, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        ("[text", "[text"),
        ([1, 2], [1, 2]),
        (["a", "b"], "a"),
        ([[1, 2], [3]], [1, 2]),
    ],
)
def test_prompts_have_many_forms(prompt, read):
    said = asked(prompt=prompt).prompt
    assert (said if isinstance(said, str) else list(said)) == read


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], {}, 5, None, [1, "a"], [-1], [1.5], [[1], "a"]]
)
def test_invalid_prompt_is_refused(prompt):
    with pytest.raises(InvalidFieldError) as caught:
        asked(prompt=prompt).check_prompt()
    assert caught.value.field == "prompt"
    assert 400 <= caught.value.http_status < 500


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", MalformedBodyError),
        (b"{", MalformedBodyError),
        (b"[]", InvalidFieldError),
        (b'{"messages": "x"}', InvalidFieldError),
        (b'{"messages": []}', InvalidFieldError),
        (b'{"messages": [{}], "stream": "yes"}', InvalidFieldError),
        (b'{"messages": [{}], "user": "\xff"}', MalformedBodyError),
        (b'{"messages": [{}], "user": "\xed\xa0\x80"}', MalformedBodyError),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", MalformedBodyError),
        (b'{"messages": [{}], "nvext": {"backend_instance_id": -1}}', InvalidFieldError),
    ],
)
def test_invalid_chat_is_refused(body, error):
    with pytest.raises(error):
        read_completion_request(CHAT, body)


@pytest.mark.parametrize("prompt", [b"\xff", b"\xed\xa0\x80", b"\\ud800"])
def test_texts_are_unicode(prompt):
    with pytest.raises(MalformedBodyError):
        read_completion_request(COMPLETIONS, b'{"prompt": "' + prompt + b'"}')


@pytest.mark.parametrize(
    ("path", "fields", "choices"),
    [
        (COMPLETIONS, {"prompt": "[[1]"}, 1),
        (COMPLETIONS, {"prompt": [1, 2], "n": 3}, 3),
        (COMPLETIONS, {"prompt": [[1], [2]], "n": None}, 2),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": "a", "n": -1}, 1),
        (CHAT, {"messages": [{}], "prompt": [[1], "a"]}, 1),
    ],
)
def test_choices_are_counted_from_the_request(path, fields, choices):
    assert asked(path, **fields).choices == choices


def test_a_field_that_is_there_twice_goes_on_once():
    twice = b'{"prompt": "a", "prompt": "b", "x": 1}'
    read = read_completion_request(COMPLETIONS, twice)
    assert read.prompt == "b"
    assert json.loads(read.to_engine()) == {"prompt": "b", "x": 1}
    assert read.to_engine().count(b"prompt") == 1


def test_unread_fields_are_forwarded_unchanged():
    fields = {"prompt": "a", "logit_bias": {"5": 1.5}, "x": [1, {"y": None}], "stream": True}
    extensions = {"nvext": {"agent_hints": {"priority": 3}}}
    sent = json.loads(asked(**fields, **extensions).to_engine(stream_options={"a": 1}))
    assert sent == {**fields, "priority": 3, "stream_options": {"a": 1}}
    assert json.loads(asked(**fields, **extensions, priority=1).to_engine())["priority"] == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"prompt": [%s]}' % b",".join([b"[1]"] * (MOST_PROMPTS + 1)), "prompt"),
        (b'{"prompt": [%s]}' % b",".join([b'""'] * (MOST_PROMPTS + 1)), "prompt"),
        (b'{"prompt": "x", "z": {%s}}' % b",".join([b'"":1'] * MOST_NAMES), "body"),
        (b'{"prompt": "x"%s}' % (b',"":1' * MOST_NAMES), "body"),
    ],
)
def test_slow_to_parse_body_is_refused(body, field):
    with pytest.raises(InvalidFieldError, match="too many") as refused:
        read_completion_request(COMPLETIONS, body)
    assert refused.value.field == field


def test_colons_in_texts_are_no_names():
    text = ":" * (MOST_NAMES + 1)
    assert asked(prompt=[text, "b"]).prompts == 2
    assert asked(CHAT, messages=[{"content": text}]).size_bytes > MOST_NAMES


@pytest.mark.parametrize("prompt", [[[1, 2], [3]], [[1, 2], [-1]], [[1, 2], [[]]]])
def test_first_of_several_prompts_is_used(prompt):
    read = asked(prompt=prompt)
    assert (list(read.prompt), read.prompts) == ([1, 2], 2)


def test_image_bytes_are_not_counted_as_tokens():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000_000}}
    tokens = len(estimated(asked(CHAT, messages=[{"content": [image, image]}])).token_ids)
    assert tokens < 3 * TOKENS_AN_IMAGE


def test_uncounted_tokens_are_estimated():
    assert len(estimated(asked(prompt="x" * 40)).token_ids) == 10
    assert not estimated(asked(CHAT, messages=[{"content": "hello"}])).are_certain


# ── Direct ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("headers", "extensions", "target"),
    [
        ([], {}, None),
        ([(b"x-worker-id", b"5")], {"backend_instance_id": 6}, RankTarget(5)),
        ([(b"x-worker-instance-id", b"5"), (b"x-data-parallel-rank", b"2")], {}, RankTarget(5, 2)),
        ([], {"backend_instance_id": 6}, RankTarget(6)),
        ([], {"decode_worker_id": 0, "prefill_worker_id": 1}, RankTarget(0)),
    ],
)
def test_a_worker_may_be_named(headers, extensions, target):
    assert named_worker(asked(prompt="a", nvext=extensions), headers) == target


def test_prefill_worker_may_be_named_by_body_or_header():
    named = asked(prompt="a", nvext={"prefill_worker_id": 4})
    assert named_prefill_worker(named, []) == 4
    assert named_prefill_worker(named, [(b"x-prefill-instance-id", b"3")]) == 3


@pytest.mark.parametrize(
    "value", [b"", b"x", b"-1", b"1" * 21, "²".encode(), b"18446744073709551616"]
)
def test_invalid_worker_id_is_refused(value):
    with pytest.raises(InvalidFieldError, match="x-worker-id"):
        named_worker(asked(prompt="a"), [(b"x-worker-id", value)])


def test_direct_mode_requires_a_named_worker():
    with pytest.raises(NoWorkerNamedError):
        demanded_worker(asked(prompt="a"), [])


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────


def event_of(**body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def choice(text="a", **fields):
    return {"index": 0, "text": text, "finish_reason": None, **fields}


def test_unrequested_fields_are_removed():
    state = StreamState(Wanted())
    shown, tokens = state.take(
        event_of(id="i", choices=[choice(token_ids=[5, 6], prompt_token_ids=[1])], usage=None)
    )
    assert json.loads(shown[6:]) == {"id": "i", "choices": [choice()]}
    assert (tokens, state.token_ids, state.has_all_tokens) == (2, [5, 6], True)
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert state.take(event_of(choices=[], usage=usage)) == (b"", 0)
    assert (state.usage.prompt_tokens, state.usage.cached) == (3, 1)
    assert not state.is_finished
    assert state.take(b"data: [DONE]\n\n") == (b"data: [DONE]\n\n", 0)
    assert state.is_finished


def test_requested_fields_stay():
    state = StreamState(Wanted(token_ids=True, usage=True))
    for event in (
        event_of(choices=[choice(token_ids=[5])], usage=None),
        event_of(choices=[], usage={"prompt_tokens": 3}),
        b": comment\n\n",
        b"event: x\ndata: y\n\n",
        b"data: {no json\n\n",
    ):
        assert state.take(event)[0] == event


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"text": "a"}, 1),
        ({"text": ""}, 0),
        ({"delta": {"role": "assistant", "content": ""}}, 0),
        ({"delta": {"content": "x"}}, 1),
        ({"delta": {"tool_calls": [{}]}}, 1),
        ({"delta": {"reasoning_content": "x"}}, 1),
        ({"text": "abc", "token_ids": [1, 2, 3]}, 3),
    ],
)
def test_tokens_are_counted(said, tokens):
    state = StreamState(Wanted())
    assert state.take(event_of(choices=[said]))[1] == tokens
    assert state.has_begun == (tokens > 0)
    assert state.has_all_tokens == ("token_ids" in said or not tokens)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": [{"text": "\xff"}]}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"choices": [{"index": 0, "text": "a", "token_ids": [-1]}]}',
        b'{"choices": [{"index": 0, "text": "a", "token_ids": [4294967296]}]}',
    ],
)
def test_unreadable_events_pass_and_are_not_migrated(data):
    state = StreamState(Wanted())
    event = b"data: " + data + b"\n\n"
    assert state.take(event) == (event, 0)
    assert not state.has_all_tokens


def test_a_stream_of_several_answers_ends_when_all_have():
    state = StreamState(Wanted(choices=2))
    for index, reason in ((0, None), (1, None), (0, "stop")):
        state.take(event_of(choices=[{"index": index, "text": "a", "finish_reason": reason}]))
        assert not state.is_finished
    state.take(event_of(choices=[{"index": 1, "text": "a", "finish_reason": "length"}]))
    assert (state.is_finished, state.is_done) == (True, False)


def test_an_engine_may_say_that_it_cannot_go_on():
    with pytest.raises(EngineErrorEvent, match="engine died"):
        StreamState(Wanted()).take(event_of(error={"message": "engine died", "code": 500}))

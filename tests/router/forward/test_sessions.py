"""Sessions and users named in headers and fields: which signal decides, and its key."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from router.forward.sessions import (
    MOST_BYTES,
    MOST_SEEN,
    NO_KEYS,
    SIGNALS,
    SeenIds,
    session_keys,
)

CLAUDE = {"x-claude-code-session-id": "S"}
VALUES = st.text("abc\u00e9 9", max_size=40).map(lambda each: f"SECRET{each}")
SOURCES = sorted({each for row in SIGNALS for each in (*row.session, *row.fair_share)}, key=repr)


def keys_of(headers=None, body=None, tenant=None, seen=None):
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    fields = {name: Raw(json.dumps(value).encode()) for name, value in (body or {}).items()}
    return session_keys(pairs, fields, tenant, SeenIds() if seen is None else seen)


def test_without_signals_there_are_no_keys():
    assert keys_of({"content-type": "application/json"}, {"model": "m", "n": 1}) is NO_KEYS


@pytest.mark.parametrize(
    ("headers", "body", "kinds"),
    [
        (CLAUDE, {}, ("claude-code", "claude-code")),
        ({"session-id": "a", "thread-id": "b"}, {}, ("codex", "codex")),
        ({"x-session-affinity": "a"}, {}, ("session", "session")),
        ({"x-deepseek-harness-session-id": "a"}, {}, ("deepseek", "deepseek")),
        ({"x-multi-turn-session-id": "a"}, {}, ("conversation", None)),
        ({}, {"conversation_params": {"conversation_id": "a"}}, ("conversation", None)),
        ({}, {"session_id": "a"}, ("engine", None)),
        ({}, {"vllm_xargs": {"session_id": "a"}}, ("engine", None)),
        ({"x-smg-routing-key": "a"}, {}, ("routing-key", None)),
        ({"x-session-token": "a"}, {}, ("token", None)),
        ({}, {"metadata": {"user_id": "u_session_s"}}, ("messages-user", "messages-user")),
        ({}, {"metadata": {"user_id": "u"}}, (None, "messages-user")),
        ({}, {"prompt_cache_key": "a", "user": "u"}, ("prompt-cache", "user")),
        ({}, {"safety_identifier": "a"}, (None, "user")),
        ({"x-llm-d-inference-fairness-id": "a", **CLAUDE}, {}, ("claude-code", "fairness")),
        ({"x-request-id": "a", "x-client-request-id": "b"}, {}, (None, None)),
    ],
)
def test_each_agent_is_recognised(headers, body, kinds):
    keys = keys_of(headers, body)
    assert keys.name is None
    found = tuple(key and key.partition(":")[0] for key in (keys.hint, keys.fair_share_id))
    assert found == kinds


@pytest.mark.parametrize("header", ["x-session-id", "x-dynamo-session-id"])
def test_a_named_session_is_not_hashed_and_comes_before_all_hints(header):
    keys = keys_of({**CLAUDE, header: "mine"})
    assert (keys.name, keys.hint) == ("mine", None)
    assert not keys.is_final
    assert keys_of({header: "mine", "x-dynamo-session-final": "true"}).is_final


def test_sub_agents_share_the_queue_of_their_parent_and_not_its_session():
    parent, child = keys_of(CLAUDE), keys_of({**CLAUDE, "x-claude-code-agent-id": "a"})
    assert parent.fair_share_id == child.fair_share_id
    assert parent.hint != child.hint
    for own, above in (
        ("x-session-affinity", "x-parent-session-id"),
        ("x-session-id", "x-parent-session-id"),
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
        ("x-deepseek-harness-session-id", "x-deepseek-harness-parent-session-id"),
        ("thread-id", "x-codex-parent-thread-id"),
    ):
        parent, child = keys_of({own: "p"}), keys_of({own: "c", above: "p"})
        assert parent.fair_share_id == child.fair_share_id
        assert (parent.hint, parent.name) != (child.hint, child.name)


def test_a_correlation_id_is_a_session_from_its_second_request_on():
    seen = SeenIds()
    asked = {"x-correlation-id": "c", "x-smg-routing-key": "k"}
    kinds = [keys_of(asked, seen=seen).hint.partition(":")[0] for _ in range(3)]
    assert kinds == ["routing-key", "correlation", "correlation"]
    assert keys_of({"x-correlation-id": "c"}, tenant="t", seen=seen).hint is None
    for index in range(2 * MOST_SEEN):
        keys_of({"x-correlation-id": f"{index}"}, seen=seen)
    assert len(seen) == MOST_SEEN
    assert keys_of({"x-correlation-id": "c"}, seen=seen).hint is None


def test_equal_values_of_tenants_and_kinds_have_different_keys():
    keys = [
        keys_of({header: "same"}, tenant=tenant).hint
        for header in ("x-smg-routing-key", "x-session-token", "thread-id")
        for tenant in (None, "", "same", "tenant same")
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("value", ["", " ", "x" * (MOST_BYTES + 1)])
def test_a_value_that_is_empty_or_too_long_is_ignored(value):
    asked = {"x-claude-code-agent-id": value, **CLAUDE}
    assert keys_of(asked) == keys_of(CLAUDE)
    assert keys_of({}, {"user": value}).fair_share_id is None


@pytest.mark.parametrize(
    "written",
    [b'"a', b"7", b"null", b"[1]", b'{"user_id": 7}', b'{"user_id"', b'"' + b"a" * 99_999],
)
def test_a_field_of_another_form_is_no_session(written):
    fields = {"metadata": Raw(written), "user": Raw(b"{}"), "session_id": Raw(b"[]")}
    assert session_keys([], fields, None, SeenIds()) == NO_KEYS


@given(st.dictionaries(st.sampled_from(SOURCES), VALUES), st.sampled_from([None, "t"]))
def test_the_first_row_with_a_value_decides_each_column(values, tenant):
    headers, body = {}, {}
    for source, value in values.items():
        if source.header:
            headers[source.header.decode()] = value
        elif len(source.path) == 1:
            body[source.path[0]] = value
        else:
            inner = f"{value}_session_{value}" if source.part else value
            body.setdefault(source.path[0], {})[source.path[1]] = inner
    keys = keys_of(headers, body, tenant)
    present = set(values)
    if "metadata" in body:  # both parts are of one value
        present |= {each for each in SOURCES if each.path[:1] == ("metadata",)}
    sessions = [
        row for row in SIGNALS if not row.needs_second and present.intersection(row.session)
    ]
    shares = [row for row in SIGNALS if present.intersection(row.fair_share)]
    assert (keys.name is not None) == bool(sessions and sessions[0].binds)
    if keys.hint is not None:
        assert keys.hint.startswith(f"{sessions[0].kind}:")
    assert (keys.fair_share_id or ":").startswith(f"{shares[0].kind if shares else ''}:")
    assert "SECRET" not in f"{keys.hint} {keys.fair_share_id}"


@given(
    st.lists(
        st.tuples(st.sampled_from([s.header for s in SOURCES if s.header]), st.binary(max_size=300))
    ),
    st.dictionaries(
        st.sampled_from(["user", "metadata", "session_id", "vllm_xargs"]), st.binary(max_size=40)
    ),
)
def test_no_bytes_make_it_fail(headers, fields):
    session_keys(headers, {name: Raw(value) for name, value in fields.items()}, "t", SeenIds())

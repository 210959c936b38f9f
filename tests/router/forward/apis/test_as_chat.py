"""Requests become the chats that vLLM made of them: their tokens are the recorded ones."""

import json

import pytest

from router.forward.apis.chats.as_chat import as_chat
from router.forward.apis.chats.chat_form import NoChatError
from router.forward.apis.chats.dialect import (
    OLDER_VLLM,
    SGLANG,
    TENSORRT_LLM,
    UNKNOWN,
    VLLM,
    dialect_of,
)
from router.forward.request_body import read_completion_request
from support.engines.recorded_tokenizer import RECORDED, recorded_tokenizer

CASES = RECORDED["cases"]
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
TOKENIZER = recorded_tokenizer()
HELLO = {"role": "user", "content": "Hello"}


def form(path, dialect=VLLM, **fields):
    body = json.dumps({"model": "m", **fields}).encode()
    return as_chat(read_completion_request(path, body), dialect)


def of(path, dialect=VLLM, **fields):
    """Messages and tools of the chat."""
    chat = json.loads(form(path, dialect, **fields).chat.to_engine())
    return chat["messages"], chat.get("tools")


@pytest.mark.parametrize("case", CASES, ids=[f"{c['path']}: {c['name']}" for c in CASES])
def test_request_has_the_tokens_that_vllm_gave_it(case):
    its = form(case["path"], **case["request"])
    _, tokens = TOKENIZER.tokens(its.chat)
    if its.keeps_last_tokens is not None:
        tokens = tokens[-its.keeps_last_tokens :]
    assert tokens == case["prompt_token_ids"]
    assert its.is_proven == (case["name"] != "tools, tool_choice none")


# ── Other engines ────────────────────────────────────────────────────────────────────────────────

SYSTEM = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "A"}]
SYSTEM.append({"type": "text", "text": "B"})


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (VLLM, "AB"),
        (OLDER_VLLM, "x-anthropic-billing-header: 1AB"),
        (SGLANG, "x-anthropic-billing-header: 1\nA\nB"),
        (TENSORRT_LLM, "A\n\nB"),
    ],
)
def test_system_blocks_are_joined_as_the_engine_does(dialect, expected):
    messages, _ = of(MESSAGES, dialect, system=SYSTEM, messages=[HELLO])
    assert messages[0] == {"role": "system", "content": expected}
    assert form(MESSAGES, dialect, system=SYSTEM, messages=[HELLO]).is_proven == (dialect is VLLM)


@pytest.mark.parametrize(("dialect", "expected"), [(VLLM, None), (SGLANG, "")])
def test_tool_without_description_has_that_of_the_engine(dialect, expected):
    given = [{"name": "f", "input_schema": {"z": 1, "type": "object", "a": 2}}]
    _, tools = of(MESSAGES, dialect, messages=[HELLO], tools=given)
    assert tools[0]["function"]["description"] == expected
    assert list(tools[0]["function"]["parameters"]) == ["z", "type", "a"]


def test_engines_are_known_by_their_names_and_versions():
    assert dialect_of("vllm", "0.32.0") is VLLM
    assert dialect_of("vllm", "0.20.2rc1") is VLLM
    assert dialect_of("vllm", "0.20.1") is OLDER_VLLM
    assert dialect_of("vllm", "") is OLDER_VLLM
    assert dialect_of("sglang", "0.5.23") is SGLANG
    assert dialect_of("tensorrt_llm", "1.2") is TENSORRT_LLM
    assert dialect_of("kv-router", "0.32.0") is UNKNOWN
    assert not form(MESSAGES, UNKNOWN, messages=[HELLO]).is_proven


# ── What is left to the engine ───────────────────────────────────────────────────────────────────


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("path", "dialect", "fields"),
    [
        (MESSAGES, VLLM, {"messages": [HELLO], "tools": [{"type": "web_search_1", "name": "w"}]}),
        (MESSAGES, VLLM, block(type="document", source={"type": "text", "data": "x"})),
        (MESSAGES, SGLANG, block(type="thinking", thinking="x")),
        (MESSAGES, SGLANG, block(type="redacted_thinking", data="x")),
        (MESSAGES, VLLM, {"messages": [{"role": "user"}]}),
        (MESSAGES, VLLM, {"messages": [HELLO], "system": 5}),
        (RESPONSES, SGLANG, {"input": "x"}),
        (RESPONSES, VLLM, {"input": "x", "previous_response_id": "resp_1"}),
        (RESPONSES, VLLM, {"input": [{"type": "web_search_call", "id": "x"}]}),
        (RESPONSES, VLLM, {"input": "x", "tools": [{"type": "mcp", "server_label": "x"}]}),
        (RESPONSES, VLLM, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
        (CHAT, VLLM, {"messages": [HELLO], "reasoning_effort": 5}),
    ],
)
def test_request_that_only_engines_can_tokenize_is_no_chat(path, dialect, fields):
    with pytest.raises(NoChatError):
        form(path, dialect, **fields)


@pytest.mark.parametrize(
    ("path", "fields", "feature"),
    [
        (CHAT, {"messages": [HELLO], "documents": [{"text": "x"}]}, "documents"),
        (CHAT, {"messages": [HELLO], "truncate_prompt_tokens": -1}, "truncated"),
        (MESSAGES, {"messages": [HELLO], "thinking": {"type": "enabled"}}, "thinking_enabled"),
        (MESSAGES, {"messages": [HELLO], "system": SYSTEM[:1]}, "empty_system"),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": str(n), "name": "f"} for n in (1, 2)]},
            "calls",
        ),
    ],
)
def test_features_that_were_never_seen_are_not_proven(path, fields, feature):
    its = form(path, **fields)
    assert feature in its.features
    assert not its.is_proven


def test_images_of_all_apis_are_parts_of_a_chat():
    url = "data:image/png;base64,AAAA"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    part = {"type": "image_url", "image_url": {"url": url}}
    said = [{"type": "input_image", "image_url": url}]
    for path, fields in (
        (MESSAGES, block(type="image", source=source)),
        (RESPONSES, {"input": [{"role": "user", "content": said}]}),
        (CHAT, block(**part)),
    ):
        assert of(path, **fields)[0] == [{"role": "user", "content": [part]}]
        assert form(path, **fields).has_images

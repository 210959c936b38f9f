"""What is remembered of pieces, and that conversations are tokenised once."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.forward.apis.api import CHAT
from router.forward.request_body import read_completion_request
from router.forward.tokenizer.chats import read_messages
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import OVERHEAD_TOKENS, TokenCache
from support.chaos.fuzzing import examples

FOLDER = Path(__file__).parents[3] / "vectors/chat_templates"
FILES = {name: read_files(str(FOLDER / name)) for name in ("chatml", "llama", "mistral", "parts")}
MOST = 5 * OVERHEAD_TOKENS


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50))))
def test_latest_pieces_are_cached(steps):
    known, model = TokenCache(MOST), {}
    for name, length in steps:
        key = bytes([name])
        if length == 0:
            assert known.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
            continue
        known.put(key, array("I", [1] * length))
        model.pop(key, None)
        model[key] = array("I", [1] * length)
        while sum(len(each) + OVERHEAD_TOKENS for each in model.values()) > MOST:
            del model[next(iter(model))]
        assert known.held_tokens <= MOST
    assert {key: known.get(key) for key in model} == model


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["system", "user", "assistant"]),
        st.text(alphabet="ab <|im_endstart>\n[INST]/é日", max_size=30),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", ["chatml", "llama", "parts"])
@settings(max_examples=examples(10))
@given(turns=TURNS, least=st.integers(1, 60))
def test_cached_and_new_pieces_have_the_same_tokens(name, turns, least):
    counts = []
    cached = LocalTokenizer(
        FILES[name], TokenCache(4096), lambda *reported: counts.append(reported), least=least
    )
    plain = LocalTokenizer(FILES[name], TokenCache(0), least=1_000_000)
    for end in range(1, len(turns) + 1):
        messages = [{"role": role, "content": text} for role, text in turns[:end]]
        asked = read_completion_request(CHAT, json.dumps({"messages": messages}).encode())
        _, tokens = plain.tokens(asked)
        assert cached.tokens(asked)[1] == tokens
        assert cached.tokens(asked)[1] == tokens
        assert counts[-1] == (len(tokens), 0)


@pytest.mark.parametrize(
    "arguments", ['{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a": ' + "9" * 10_000 + "}"]
)
def test_deep_or_huge_tool_arguments_are_refused(arguments):
    local = LocalTokenizer(FILES["chatml"], TokenCache(0))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(PromptRefusedError) as refusal:
        local.tokens(read_completion_request(CHAT, json.dumps(body).encode()))
    assert refusal.value.http_status == 400


def test_deep_messages_are_refused():
    raw = b'[{"role": "user", "name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]"
    with pytest.raises(PromptRefusedError):
        read_messages(raw)


def test_text_known_in_one_partition_is_new_in_another():
    counts = []
    local = LocalTokenizer(FILES["chatml"], TokenCache(1_000_000), lambda *t: counts.append(t))
    body = {"messages": [{"role": "user", "content": "a question " * 200}]}
    asked = read_completion_request(CHAT, json.dumps(body).encode())
    for partition in (b"", b"acme", b"evil", b"acme"):
        tokens = local.tokens(asked, partition=partition)[1]
    assert [known for known, _ in counts] == [0, 0, 0, len(tokens)]


def test_a_conversation_is_tokenised_once():
    counts = []
    local = LocalTokenizer(FILES["chatml"], TokenCache(1_000_000), lambda *t: counts.append(t))
    messages = []
    for turn in range(20):
        messages.append(
            {"role": "user", "content": f"{turn}: " + "a question of some length " * 30}
        )
        asked = read_completion_request(CHAT, json.dumps({"messages": messages}).encode())
        local.tokens(asked)
        messages.append({"role": "assistant", "content": "an answer " * 60})
    known, made = (sum(each) for each in zip(*counts, strict=True))
    assert made < 1.2 * (counts[-1][0] + counts[-1][1])  # of the last, which has all of them
    assert known > 8 * made


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "a"}]},
        {"truncate_prompt_tokens": 5},
        {"chat_template_kwargs": {"messages": []}},
        {"continue_final_message": True},
        {"tools": [{"type": "web_search"}]},
        {"tools": [], "tool_choice": "none"},
        {"reasoning_effort": 5},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "reasoning_content": "Hm"}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: a\nb"}]},
    ],
)
def test_unknown_models_are_left_to_engines(fields):
    local = LocalTokenizer(FILES["chatml"], TokenCache(0))
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(NotLocalError):
        local.tokens(read_completion_request(CHAT, json.dumps(body).encode()))

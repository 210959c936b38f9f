"""What is remembered of pieces, and that conversations are tokenised once."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzzing import examples
from router.forward.bodies import CHAT, read_asked
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.known_pieces import OVERHEAD_TOKENS, KnownPieces
from router.forward.tokenizer.local import LocalTokenizer

FOLDER = Path(__file__).parents[3] / "vectors/chat_templates"
FILES = {name: read_files(str(FOLDER / name)) for name in ("chatml", "llama", "mistral", "parts")}
MOST = 5 * OVERHEAD_TOKENS


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50))))
def test_what_was_used_last_is_known(steps):
    known, model = KnownPieces(MOST), {}
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
@settings(max_examples=examples(30))
@given(turns=TURNS, least=st.integers(1, 60))
def test_tokens_are_the_same_known_or_not(name, turns, least):
    counts = []
    cached = LocalTokenizer(
        FILES[name], KnownPieces(4096), lambda *told: counts.append(told), least=least
    )
    plain = LocalTokenizer(FILES[name], KnownPieces(0), least=1_000_000)
    for end in range(1, len(turns) + 1):
        messages = [{"role": role, "content": text} for role, text in turns[:end]]
        asked = read_asked(CHAT, json.dumps({"messages": messages}).encode())
        _, tokens = plain.tokens(asked)
        assert cached.tokens(asked)[1] == tokens
        assert cached.tokens(asked)[1] == tokens
        assert counts[-1] == (len(tokens), 0)


def test_a_conversation_is_tokenised_once():
    counts = []
    local = LocalTokenizer(FILES["chatml"], KnownPieces(1_000_000), lambda *t: counts.append(t))
    messages = []
    for turn in range(20):
        messages.append(
            {"role": "user", "content": f"{turn}: " + "a question of some length " * 30}
        )
        asked = read_asked(CHAT, json.dumps({"messages": messages}).encode())
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
def test_what_is_not_known_here_is_left_to_engines(fields):
    local = LocalTokenizer(FILES["chatml"], KnownPieces(0))
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(NotLocalError):
        local.tokens(read_asked(CHAT, json.dumps(body).encode()))

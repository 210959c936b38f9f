"""The reference engine's tokenizer as `up` writes it, beside the engine's own code."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.request_body import read_completion_request
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.probes import probes
from router.forward.tokenizer.token_cache import TokenCache
from router.tools.up.fleet import write_tokenizer
from worker_agent.reference.chat import TokenizeRequest

TEXT = st.text(max_size=40)
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": TEXT | PARTS | st.none(),
        }
    ),
    min_size=1,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up") / "tokenizer"
    assert write_tokenizer(folder)
    return LocalTokenizer(read_files(str(folder)), TokenCache(1000))


def of_engine(fields):
    return msgspec.convert(fields, TokenizeRequest).tokens


@given(text=TEXT)
def test_texts(tokenizer, text):
    assert tokenizer.text_tokens(text) == of_engine({"prompt": text}) == list(text.encode())


@given(messages=MESSAGES)
def test_chats(tokenizer, messages):
    asked = read_completion_request(CHAT, json.dumps({"messages": messages}).encode())
    assert tokenizer.tokens(asked)[1] == of_engine({"messages": messages})


def test_probes_of_every_kind(tokenizer):
    for probe in probes("default", tokenizer.added_texts()):
        fields = {name: msgspec.json.decode(raw) for name, raw in probe.asked.fields.items()}
        assert probe.asked.path == COMPLETIONS or "messages" in fields
        assert tokenizer.tokens(probe.asked) == (probe.kind, of_engine(fields))

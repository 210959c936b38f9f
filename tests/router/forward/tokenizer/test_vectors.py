"""Chats become what vLLM and `transformers` make of them; see vectors/chat_templates/README.md."""

import json
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.request_body import read_completion_request
from router.forward.tokenizer import template
from router.forward.tokenizer.errors import PromptRefusedError
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import TokenCache

FOLDER = Path(__file__).parents[3] / "vectors/chat_templates"
RECORDED = msgspec.json.decode((FOLDER / "cases.json").read_bytes())
MADE = [(name, chat) for name in RECORDED["made"] for chat in RECORDED["chats"]]
LOCAL = {
    name: LocalTokenizer(read_files(str(FOLDER / name)), TokenCache(10_000), least=8)
    for name in RECORDED["made"]
}


@pytest.fixture
def on_that_day(monkeypatch):
    day = datetime.fromisoformat(RECORDED["day"])
    monkeypatch.setattr(template, "_now", lambda: day)


@pytest.mark.parametrize(("name", "chat"), MADE)
def test_a_chat_has_the_tokens_of_vllm(name, chat, on_that_day):
    expected = RECORDED["made"][name]["chats"][chat]
    asked = read_completion_request(
        CHAT, json.dumps({"model": "m", **RECORDED["chats"][chat]}).encode()
    )
    if "refused" in expected:
        with pytest.raises(PromptRefusedError) as caught:
            LOCAL[name].tokens(asked)
        assert expected["refused"] in str(caught.value)
        assert (caught.value.field, caught.value.http_status) == ("messages", 400)
        return
    for _ in range(2):  # the second time its pieces are known
        assert LOCAL[name].tokens(asked)[1] == expected["ids"]


@pytest.mark.parametrize("name", LOCAL)
def test_a_text_has_the_tokens_of_transformers(name):
    for text in RECORDED["made"][name]["texts"]:
        body = json.dumps({"prompt": text["text"] or " "}).encode()
        if text["text"]:
            assert LOCAL[name].tokens(read_completion_request(COMPLETIONS, body)) == (
                "text",
                text["ids"],
            )
        assert LOCAL[name].text_tokens(text["text"]) == text["ids"]

import msgspec
import pytest

from router.errors import InvalidFieldError
from worker_agent.reference.chat import MAX_TOKENS, ChatRequest, TokenizeRequest


def chat(**fields):
    return msgspec.convert(fields, ChatRequest)


SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé"}]


def test_a_longer_chat_begins_with_the_shorter():
    first = chat(messages=SAID).completion.prompt
    assert first == "<system>Be brief.\n<user>Hé\n<assistant>"
    more = [*SAID, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert chat(messages=more).completion.prompt.startswith(first)


def test_tokens_are_those_that_are_read():
    asked = msgspec.convert({"messages": SAID}, TokenizeRequest)
    assert asked.tokens == list(chat(messages=SAID).completion.prompt.encode())
    assert msgspec.convert({"prompt": "é"}, TokenizeRequest).tokens == [0xC3, 0xA9]
    with pytest.raises(InvalidFieldError):
        _ = TokenizeRequest().tokens


def test_a_chat_may_end_without_an_answer_or_with_a_message_that_goes_on():
    open_end = {"add_generation_prompt": False}
    assert chat(messages=SAID, **open_end).completion.prompt == "<system>Be brief.\n<user>Hé\n"
    continued = chat(messages=SAID, **open_end, continue_final_message=True)
    assert continued.completion.prompt == "<system>Be brief.\n<user>Hé"
    with pytest.raises(InvalidFieldError, match="continue_final_message"):
        _ = chat(messages=SAID, continue_final_message=True).completion


def test_fields_go_on():
    fields = {"temperature": 0.5, "seed": 3, "stream": True, "return_token_ids": True, "n": 2}
    completion = chat(messages=SAID, max_completion_tokens=9, max_tokens=5, **fields).completion
    assert completion.max_tokens == 9
    assert all(getattr(completion, name) == value for name, value in fields.items())
    assert chat(messages=SAID).completion.max_tokens == MAX_TOKENS


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>ab\n" in chat(messages=[{"role": "user", "content": parts}]).completion.prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": SAID, "max_tokens": -1},
        {"messages": SAID, "temperature": -1.0},
    ],
)
def test_unanswerable_chat_is_refused(fields):
    with pytest.raises(InvalidFieldError):
        _ = chat(**fields).completion

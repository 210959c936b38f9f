"""Writes tests/vectors/chat_templates: what `transformers` and vLLM make of chats.

    /path/to/vllm's/python tests/vllm/record_chat_templates.py

Each folder there has a small tokenizer, trained once, and a template in the style of a family of
models; both are read, not written. `cases.json` is written: for each of CHATS the text and the
token ids of vLLM's own code, which parses messages and calls `apply_chat_template` of transformers,
or that it refuses them.
"""

import datetime
import json
import re
from pathlib import Path
from types import SimpleNamespace

import transformers
import transformers.utils.chat_template_utils as template_utils
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template
from vllm.version import __version__ as vllm_version

FOLDER = Path(__file__).parents[1] / "vectors/chat_templates"
DAY = datetime.datetime(2024, 7, 26, 12, 0)

SYSTEM = {"role": "system", "content": "You are brief. "}
USER = {"role": "user", "content": "Why is the sky blue?\n\n  Say  it in Ж and 日本語. "}
ANSWER = {"role": "assistant", "content": ' Rayleigh <|im_end|> scattering; 1 < 2 & "so".\n'}
MORE = {"role": "user", "content": "And at dusk? <s>[INST]"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2.0}'},
        }
    ],
}
BROKEN_CALL = {
    **CALL,
    "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "now", "arguments": "{"}}],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": '{"sky": "clear"}'}
RESULT_IN_PARTS = {
    **RESULT,
    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
}
IN_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
}
DEVELOPER = {"role": "developer", "content": "Be kind."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the sky does <now> & later, in °C",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
]

CHATS = {
    "a question": {"messages": [USER]},
    "a conversation": {"messages": [SYSTEM, USER, ANSWER, MORE]},
    "no system": {"messages": [USER, ANSWER, MORE]},
    "a named user": {"messages": [{**USER, "name": "ann"}]},
    "without a prompt": {"messages": [USER], "add_generation_prompt": False},
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "no content": {"messages": [USER, {"role": "assistant", "content": None}, MORE]},
    "parts": {"messages": [SYSTEM, IN_PARTS]},
    "system in parts": {"messages": [{**IN_PARTS, "role": "system"}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "no tools": {"messages": [USER], "tools": []},
    "a call": {"messages": [USER, CALL, RESULT], "tools": TOOLS},
    "a broken call": {"messages": [USER, BROKEN_CALL, RESULT], "tools": TOOLS},
    "no calls": {"messages": [USER, {**ANSWER, "tool_calls": []}, MORE]},
    "a result in parts": {"messages": [USER, CALL, RESULT_IN_PARTS], "tools": TOOLS},
    "continued": {
        "messages": [USER, ANSWER],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued parts": {
        "messages": [USER, {**IN_PARTS, "role": "assistant"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "not thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "unset": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": None, "x": "auto"}},
    "a date": {"messages": [USER], "chat_template_kwargs": {"date_string": "1 May 2025"}},
    "a developer": {"messages": [SYSTEM, USER, DEVELOPER, MORE]},
    "an odd role": {"messages": [USER, {"role": "critic", "content": "Hm."}]},
    "out of turn": {"messages": [USER, MORE]},
    "special tokens": {"messages": [USER], "add_special_tokens": True},
}
TEXTS = ["", "a", " The sky,\n\n  <|im_start|>user\nblue</s>  ", "Ж и 日本語 123456"]


class Clock(datetime.datetime):
    @classmethod
    def now(cls):
        return DAY


def record(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chats = {name: chat_tokens(tokenizer, body) for name, body in CHATS.items()}
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    return {"chats": chats, "texts": texts}


def chat_tokens(tokenizer, body):
    template = tokenizer.chat_template
    config = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    content_format = _detect_content_format(template, default="string")
    messages = json.loads(json.dumps(body["messages"]))
    conversation, _, _ = parse_chat_messages(messages, config, content_format)
    own = body.get("chat_template_kwargs") or {}
    try:
        text = safe_apply_chat_template(
            config,
            tokenizer,
            conversation,
            tools=tools(body),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            **{name: value for name, value in own.items() if value not in (None, "auto")},
        )
    except VLLMValidationError as error:
        return {"refused": str(error)}
    special = body.get("add_special_tokens", False)
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    return {"text": text, "ids": ids}


def tools(body):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    said = body.get("tools")
    return (
        None if said is None else [ChatCompletionToolsParam(**each).model_dump() for each in said]
    )


def main():
    template_utils.datetime = Clock
    folders = sorted(each for each in FOLDER.iterdir() if each.is_dir())
    made_by = {"transformers": transformers.__version__, "vllm": vllm_version}
    said = {"made_by": made_by, "day": DAY.isoformat(), "chats": CHATS}
    said["made"] = {folder.name: record(folder) for folder in folders}
    lines = re.sub(r"\n {3,}", " ", json.dumps(said, indent=1))  # a line for each case
    (FOLDER / "cases.json").write_text(re.sub(r"\n {2,}(?=[}\]])", "", lines) + "\n")


if __name__ == "__main__":
    main()

"""The rules by which engines make a chat of a request, which differ by kind and version.

Facts: vLLM 0.32 as it ran; SGLang 0.5.23 and TensorRT-LLM as their sources say.
"""

import re
from typing import Literal, TypeAlias

from msgspec import Struct

BILLING = "x-anthropic-billing-header"
"""The beginning of a line with a number of its own in every request, which Claude Code sends."""

Billing: TypeAlias = Literal["dropped", "first_dropped", "kept"]
Thinking: TypeAlias = Literal["effort_none", "ignored", "unknown"]


class Dialect(Struct, frozen=True):
    """The rules of one kind of engine.

    `system_joint`, `thinking_joint`: what joins the blocks of a system prompt, and of the thoughts
    of a message. `billing`: what becomes of a system block that begins with `BILLING`.
    `description`: of a tool that has none. `thinking_disabled`: its effect on the prompt.
    `maps_effort`: `reasoning_effort` and `reasoning_content` have the names that templates read
    only in chats, not where chats are tokenized. `is_known`: the rules were seen to hold; otherwise
    an engine has to confirm every prompt made by them.
    """

    name: str
    system_joint: str = ""
    thinking_joint: str | None = ""
    billing: Billing = "dropped"
    description: str | None = None
    thinking_disabled: Thinking = "effort_none"
    maps_effort: bool = True
    is_known: bool = False


VLLM = Dialect("vllm", is_known=True)
OLDER_VLLM = Dialect("vllm", billing="kept")
SGLANG = Dialect(
    "sglang",
    system_joint="\n",
    thinking_joint=None,
    billing="kept",
    description="",
    thinking_disabled="unknown",
    maps_effort=False,
)
TENSORRT_LLM = Dialect(
    "tensorrt_llm",
    system_joint="\n\n",
    billing="first_dropped",
    thinking_disabled="ignored",
    maps_effort=False,
)
UNKNOWN = Dialect("unknown")

_BILLING_DROPPED_FROM = (0, 20, 2)
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def dialect_of(owned_by: str, version: str) -> Dialect:
    """Return the rules of an engine: `owned_by` as its list of models says, and its version."""
    if owned_by == "sglang":
        return SGLANG
    if owned_by == "tensorrt_llm":
        return TENSORRT_LLM
    if owned_by != "vllm":
        return UNKNOWN
    found = _NUMBERS.match(version)
    numbers = tuple(int(each or 0) for each in found.groups()) if found else ()
    return VLLM if numbers >= _BILLING_DROPPED_FROM else OLDER_VLLM

"""The usage that engines report, in the words of each API.

Chats and completions, as well as the router, name a prompt's tokens `prompt_tokens`. The other APIs
name them `input_tokens`: all of them in Responses, those that were not cached in Messages.
"""

import msgspec
from msgspec import Struct

from router.protocol.requests import CachedTokens, Usage
from router.protocol.values import UNREADABLE, TokenCount


class MessagesUsage(Struct, frozen=True):
    """The usage of Messages: the three kinds of input tokens add up to the prompt."""

    input_tokens: TokenCount | None = None
    cache_creation_input_tokens: TokenCount | None = None
    cache_read_input_tokens: TokenCount | None = None
    output_tokens: TokenCount = 0

    @property
    def prompt(self) -> Usage | None:
        """The prompt's usage, or None if the report is about the output alone."""
        if self.input_tokens is None:
            return None
        created, cached = self.cache_creation_input_tokens or 0, self.cache_read_input_tokens
        return Usage(self.input_tokens + created + (cached or 0), cached)


class ResponsesUsage(Struct, frozen=True):
    """The usage of Responses."""

    input_tokens: TokenCount
    input_tokens_details: CachedTokens | None = None
    output_tokens: TokenCount = 0

    @property
    def prompt(self) -> Usage:
        """The prompt's usage."""
        details = self.input_tokens_details
        return Usage(self.input_tokens, None if details is None else details.cached_tokens)


class Reported(Struct, frozen=True):
    """The usage in a whole answer. `answer_id`: the id under which its engine may keep it."""

    usage: Usage | None = None
    answer_id: str | None = None


class _OpenAi(Struct, frozen=True):
    usage: Usage | None = None


class _Responses(Struct, frozen=True):
    id: str | None = None
    usage: ResponsesUsage | None = None


class _Messages(Struct, frozen=True):
    usage: MessagesUsage | None = None


_openai = msgspec.json.Decoder(_OpenAi).decode
_responses = msgspec.json.Decoder(_Responses).decode
_messages = msgspec.json.Decoder(_Messages).decode


def of_openai(body: bytes) -> Reported:
    """Return what a whole chat or completion reports; nothing if it is unreadable."""
    try:
        return Reported(_openai(body).usage)
    except UNREADABLE:
        return Reported()


def of_responses(body: bytes) -> Reported:
    """Return what a whole response of Responses reports; nothing if it is unreadable."""
    try:
        read = _responses(body)
    except UNREADABLE:
        return Reported()
    return Reported(None if read.usage is None else read.usage.prompt, read.id)


def of_messages(body: bytes) -> Reported:
    """Return what a whole message reports; nothing if it is unreadable."""
    try:
        read = _messages(body)
    except UNREADABLE:
        return Reported()
    return Reported(None if read.usage is None else read.usage.prompt)


def of_nothing(body: bytes) -> Reported:  # noqa: ARG001 - as the others
    """Return that an answer reports no usage: nothing was computed for it."""
    return Reported()

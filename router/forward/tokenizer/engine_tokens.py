"""Tokenization by an engine: calls of `/tokenize`, in the format of vLLM's server."""

from typing import Any

import msgspec
from msgspec import Struct

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest
from router.protocol.values import UNREADABLE, TokenId
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError

PATIENCE_S = 10.0
ANSWER_LIMIT_BYTES = 64 * 1024 * 1024

_OF_CHATS = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
)
_OF_TEXTS = ("add_special_tokens",)


class _Tokenized(Struct, frozen=True):
    tokens: list[TokenId]


_read = msgspec.json.Decoder(_Tokenized).decode


class NoTokensError(UpstreamError):
    """An engine does not return tokens. `status`: the status of its response."""

    code = "no_tokens"

    def __init__(self, server: str, status: int) -> None:
        super().__init__(server, "refused", f"/tokenize: {status}")
        self.status = status


class EngineTokens:
    """A client of `/tokenize`. `authorization`: this process's credentials for engines, or None."""

    def __init__(self, pool: HttpPool, authorization: bytes | None) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
        self._headers = headers + (((b"authorization", authorization),) if authorization else ())
        self._pool = pool

    async def tokenize(self, endpoint: str, question: bytes) -> list[int]:
        """Return the tokens of a `/tokenize` body.

        Raises UpstreamError, including NoTokensError, and InvalidFieldError for an invalid
        endpoint.
        """
        origin = Origin.of(endpoint)
        request = Request("POST", "/tokenize", question, self._headers, is_repeatable=True)
        async with self._pool.response(origin, request, PATIENCE_S) as answer:
            content = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
        if answer.status != 200:
            raise NoTokensError(str(origin), answer.status)
        try:
            return _read(content).tokens
        except UNREADABLE as error:
            raise UpstreamError(str(origin), "malformed", f"/tokenize: {error}") from error


def question(asked: CompletionRequest) -> bytes:
    """Return the body of a `/tokenize` request; equal prompts give equal bodies."""
    fields: dict[str, Any] = {"model": asked.model}
    names = _OF_CHATS if asked.path == CHAT else _OF_TEXTS
    fields |= {name: asked.fields[name] for name in names if name in asked.fields}
    if asked.path != CHAT:
        fields["prompt"] = asked.prompt
    return msgspec.json.encode(fields)

"""Asking an engine for the tokens of a prompt: `/tokenize`, as vLLM's server has it."""

from typing import Any

import msgspec
from msgspec import Struct

from router.forward.bodies import CHAT, UNREADABLE, Asked
from router.http_client import HttpPool, Origin, Request, UpstreamError
from router.protocol.values import TokenId

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
    """An engine does not say them. `status`: what it answered."""

    code = "no_tokens"

    def __init__(self, server: str, status: int) -> None:
        super().__init__(server, "refused", f"/tokenize: {status}")
        self.status = status


class TokensOfEngines:
    """Asks. `authorization`: ours for engines."""

    def __init__(self, pool: HttpPool, authorization: bytes | None) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
        self._headers = headers + (((b"authorization", authorization),) if authorization else ())
        self._pool = pool

    async def ask(self, endpoint: str, question: bytes) -> list[int]:
        """The tokens. Raises UpstreamError, of these NoTokensError, and InvalidFieldError for an
        endpoint that is none.
        """
        origin = Origin.of(endpoint)
        request = Request("POST", "/tokenize", question, self._headers, is_repeatable=True)
        async with self._pool.asked(origin, request, PATIENCE_S) as answer:
            said = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
        if answer.status != 200:
            raise NoTokensError(str(origin), answer.status)
        try:
            return _read(said).tokens
        except UNREADABLE as error:
            raise UpstreamError(str(origin), "malformed", f"/tokenize: {error}") from error


def question(asked: Asked) -> bytes:
    """What `/tokenize` is asked of a prompt; the same for the same prompt."""
    fields: dict[str, Any] = {"model": asked.model}
    names = _OF_CHATS if asked.path == CHAT else _OF_TEXTS
    fields |= {name: asked.fields[name] for name in names if name in asked.fields}
    if asked.path != CHAT:
        fields["prompt"] = asked.prompt
    return msgspec.json.encode(fields)

"""Calls of engines that say what they make of a prompt, and what they are."""

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from router.forward.apis.api import COUNT_TOKENS
from router.forward.apis.chats.dialect import UNKNOWN, Dialect, dialect_of
from router.protocol.values import UNREADABLE, TokenId, UInt
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError

PATIENCE_S = 10.0
ANSWER_LIMIT_BYTES = 64 * 1024 * 1024

NOT_SERVED = frozenset((403, 404, 405, 501))
"""Statuses of a route that an engine lacks, or has switched off."""

Key: TypeAlias = bytes | None
"""The value of the header `authorization` for an engine, if there is one."""


class NoTokensError(UpstreamError):
    """An engine does not return tokens. `status`: the status of its response."""

    code = "no_tokens"

    def __init__(self, server: str, status: int, route: str = "/tokenize") -> None:
        super().__init__(server, "refused", f"{route}: {status}")
        self.status = status


class Range(Struct, frozen=True):
    """The placeholders of one image in a prompt."""

    offset: UInt
    length: UInt


class Features(Struct, frozen=True):
    """The images and other media of a prompt, by modality."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Range]] = {}


class Rendered(Struct, frozen=True):
    """The prompt that an engine makes of a request."""

    token_ids: list[TokenId]
    features: Features | None = None


class _Tokenized(Struct, frozen=True):
    tokens: list[TokenId]


class _Counted(Struct, frozen=True):
    input_tokens: UInt


class _Model(Struct, frozen=True):
    owned_by: str = ""


class _Models(Struct, frozen=True):
    data: list[_Model] = []


class _Version(Struct, frozen=True):
    version: str = ""


_tokenized = msgspec.json.Decoder(_Tokenized).decode
_rendered = msgspec.json.Decoder(Rendered).decode
_counted = msgspec.json.Decoder(_Counted).decode
_models = msgspec.json.Decoder(_Models).decode
_version = msgspec.json.Decoder(_Version).decode


class EngineClient:
    """Asks engines. `authorization`: this process's credentials for engines.

    None: those of the client for whom they are asked.
    """

    def __init__(self, pool: HttpPool, authorization: bytes | None) -> None:
        self._pool = pool
        self._authorization = authorization

    async def tokenize(self, endpoint: str, question: bytes, key: Key = None) -> list[int]:
        """Return the tokens of a `/tokenize` body.

        Raises UpstreamError, including NoTokensError, and InvalidFieldError for an invalid
        endpoint.
        """
        read = await self._asked(endpoint, "POST", "/tokenize", key, _tokenized, question)
        tokens: list[int] = read.tokens
        return tokens

    async def render(self, endpoint: str, path: str, body: bytes, key: Key) -> Rendered:
        """Return what an engine makes of a request to `path`. Raises as `tokenize` does."""
        rendered: Rendered = await self._asked(
            endpoint, "POST", f"{path}/render", key, _rendered, body
        )
        return rendered

    async def count(self, endpoint: str, body: bytes, key: Key) -> int:
        """Return the number of prompt tokens of Messages. Raises as `tokenize` does."""
        read = await self._asked(endpoint, "POST", COUNT_TOKENS, key, _counted, body)
        tokens: int = read.input_tokens
        return tokens

    async def dialect(self, endpoint: str, key: Key) -> Dialect:
        """Return the rules of an engine, by what it says it is. Raises as `tokenize` does."""
        models = await self._asked(endpoint, "GET", "/v1/models", key, _models)
        owner = next((each.owned_by for each in models.data if each.owned_by), "")
        if dialect_of(owner, "") is UNKNOWN:
            return UNKNOWN
        version = await self._asked(endpoint, "GET", "/version", key, _version)
        return dialect_of(owner, version.version)

    async def _asked(
        self, endpoint: str, method: str, path: str, key: Key, read: Any, body: bytes = b""
    ) -> Any:
        origin = Origin.of(endpoint)
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if body:
            headers = ((b"content-type", b"application/json"),)
        authorization = key if self._authorization is None else self._authorization
        if authorization:
            headers += ((b"authorization", authorization),)
        request = Request(method, path, body, headers, is_repeatable=True)
        async with self._pool.response(origin, request, PATIENCE_S) as answer:
            content = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
        if answer.status != 200:
            raise NoTokensError(str(origin), answer.status, path)
        try:
            return read(content)
        except UNREADABLE as error:
            raise UpstreamError(str(origin), "malformed", f"{path}: {error}") from error

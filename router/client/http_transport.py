"""The HTTP transport of the client, with persistent connections."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from router.client.bodies import NO_FIELDS, encoded
from router.client.calls import Question
from router.client.errors import UnansweredError, rebuilt
from router.client.retry import HeadersOf
from router.client.settings import Patience
from router.errors import InvalidFieldError, KvRouterError
from router.protocol.replies import WARNINGS_HEADER
from router.protocol.values import UNREADABLE
from router.runtime.http_client import (
    HttpPool,
    NeverSentError,
    Origin,
    PoolLimits,
    Request,
    UpstreamError,
    UpstreamResponse,
)

T = TypeVar("T")

MAX_CONNECTIONS = 256
ANSWER_LIMIT_BYTES = 256 * 1024 * 1024


class HttpTransport:
    """Connections to the router, or the load balancer of several routers, at a URL."""

    def __init__(self, origin: Origin, pool: HttpPool) -> None:
        self._origin = origin
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, url: str, tls: ssl.SSLContext | None
    ) -> AsyncIterator["HttpTransport"]:
        """Yield a transport, which connects when needed.

        `tls`: None verifies certificates as the system does. Raises InvalidFieldError for an
        invalid URL.
        """
        pool = HttpPool(PoolLimits(max_connections=MAX_CONNECTIONS), tls)
        try:
            yield cls(Origin.of(url), pool)
        finally:
            pool.close()

    async def send(self, question: Question[T], headers: HeadersOf, patience: Patience) -> T:
        """Send one attempt and return the response.

        A router that dies closes its connections, so the timeout is the total one from the start.
        Raises the router's errors, UnansweredError, or InvalidFieldError for an id that no path can
        contain.
        """
        if "/" in (question.request_id or ""):
            raise InvalidFieldError("request_id", repr(question.request_id), "no slash over HTTP")
        request, total_s = _request(question, headers(question)), patience.total_s
        try:
            answer = await self._pool.send(self._origin, request, total_s)
            try:
                body = await answer.read(ANSWER_LIMIT_BYTES, total_s)
            finally:
                answer.close()
        except NeverSentError as error:
            raise self._unanswered(error, is_maybe_done=False) from error
        except UpstreamError as error:
            raise self._unanswered(error, is_maybe_done=True) from error
        if answer.status >= 400:
            raise _refusal(answer, body)
        try:
            reply: T = msgspec.json.decode(body, type=question.call.reply)
            joined = question.call.joined
            return reply if joined is None else joined(reply, _warnings(answer))
        except UNREADABLE as error:
            raise self._unanswered(error, is_maybe_done=True) from error

    def _unanswered(self, error: Exception, *, is_maybe_done: bool) -> UnansweredError:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return UnansweredError(str(self._origin), reason, is_maybe_done=is_maybe_done)


def _request(question: Question[T], headers: dict[str, str]) -> Request:
    """Return an HTTP request, which has a body only with fields or with POST."""
    call = question.call
    is_repeatable = call.is_repeatable and not call.books
    lines = tuple(
        (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
    )
    body = encoded(question)
    if call.method != "POST" and body.content == NO_FIELDS:
        return Request(call.method, question.path, b"", (), is_repeatable, lines)
    path = question.path
    if body.parameters:
        path = f"{path}?{_query(tuple(body.parameters.items()))}"
    kind = ((b"content-type", body.media_type.encode()),)
    return Request(call.method, path, body.content, kind, is_repeatable, lines)


@lru_cache(maxsize=1024)
def _query(parameters: tuple[tuple[str, str], ...]) -> str:
    return urlencode(parameters)


def _warnings(answer: UpstreamResponse) -> tuple[str, ...]:
    """Return the warnings in the header of a response. Raises what UNREADABLE names."""
    header = answer.header(WARNINGS_HEADER)
    return () if header is None else msgspec.json.decode(header, type=tuple[str, ...])


def _refusal(answer: UpstreamResponse, content: bytes) -> KvRouterError:
    """Return the error of a response. Intermediaries may respond in other formats."""
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        text = content[:200].decode(errors="replace")
        body = {"error": f"status {answer.status}: {text}"}
    retry_after = answer.header(b"retry-after")
    return rebuilt(
        body, answer.status, None if retry_after is None else retry_after.decode("latin-1")
    )

"""Questions over HTTP, on connections that are kept."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import msgspec

from router.client.bodies import encoded
from router.client.calls import Question
from router.client.errors import UnansweredError
from router.client.refusals import rebuilt
from router.errors import InvalidFieldError, KvRouterError

T = TypeVar("T")

MAX_CONNECTIONS = 256
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class HttpTransport:
    """To the router, or the balancer before several, at a URL."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, url: str, tls: ssl.SSLContext | None
    ) -> AsyncIterator["HttpTransport"]:
        """Connections are made when they are needed. `tls`: None checks as the system does."""
        client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None),  # each attempt has its own
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
            verify=tls or True,
        )
        async with client:
            yield cls(url, client)

    async def ask(self, question: Question[T], headers: dict[str, str], timeout_s: float) -> T:
        """The answer to one attempt. Raises what the router refuses with, and UnansweredError;
        InvalidFieldError for an id that no path can have.
        """
        if "/" in (question.request_id or ""):
            raise InvalidFieldError("request_id", repr(question.request_id), "no slash over HTTP")
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.send(self._request(question, headers))
        except _NEVER_SENT as error:
            raise self._unanswered(error, is_maybe_done=False) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._unanswered(error, is_maybe_done=True) from error
        if answer.status_code >= 400:
            raise _refusal(answer)
        try:
            reply: T = msgspec.json.decode(answer.content, type=question.call.reply)
        except msgspec.MsgspecError as error:
            raise self._unanswered(error, is_maybe_done=True) from error
        return reply

    def _request(self, question: Question[T], headers: dict[str, str]) -> httpx.Request:
        """Without a body where nothing is to be said, unless HTTP wants one."""
        method, path = question.call.method, question.path
        if method != "POST" and not question.fields:
            return self._client.build_request(method, path, headers=headers)
        body = encoded(question)
        typed = {**headers, "content-type": body.media_type}
        return self._client.build_request(
            method, path, content=body.content, params=body.parameters, headers=typed
        )

    def _unanswered(self, error: Exception, *, is_maybe_done: bool) -> UnansweredError:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return UnansweredError(self._url, reason, is_maybe_done=is_maybe_done)


def _refusal(answer: httpx.Response) -> KvRouterError:
    """What stands between may refuse in words of its own."""
    try:
        body = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        body = {"error": f"status {answer.status_code}: {answer.text[:200]}"}
    return rebuilt(body, answer.status_code, answer.headers.get("retry-after"))

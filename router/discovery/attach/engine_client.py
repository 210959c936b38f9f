"""Requests to an HTTP server that may be a stranger: bounded, and without redirects."""

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Struct

from router.errors import ServerError
from router.protocol.values import UNREADABLE

TIMEOUT_S = 30.0
TLS_TIMEOUT_S = 1.0
MOST_BYTES = 32 * 1024 * 1024
"""Limit of a response; the metrics of a large engine have about 1 MB."""

NOTHING_LISTENS = "nothing listens there"
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Response(Struct, frozen=True):
    """A response of any status. `software`: the name that the server gives itself."""

    status: int
    content: bytes
    software: str = ""
    media_type: str = ""


class EngineClient:
    """Requests to one server. To be closed.

    Redirects are not followed, and a response has limits of time and bytes.
    """

    def __init__(
        self, url: str, timeout_s: float = TIMEOUT_S, options: Mapping[str, Any] = NO_OPTIONS
    ) -> None:
        """Set up a client; `options`: of httpx, such as credentials."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, trust_env=False, **options)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def fetch(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return a response of any status. Raises ServerError if there is none."""
        url, content = self.url + path, bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, url, json=body, headers=headers) as response,
            ):
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise ServerError(url, f"more than {MOST_BYTES} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerError(url, f"no response in {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ServerError(url, await self._reason(error)) from error
        names = response.headers
        media_type = names.get("content-type", "").partition(";")[0]
        return Response(response.status_code, bytes(content), names.get("server", ""), media_type)

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object of a response. Raises ServerError."""
        response = await self.fetch(method, path, body, headers)
        if not 200 <= response.status < 300:
            text = response.content[:200].decode(errors="replace")
            reason = f"status {response.status}: {text}"
            raise ServerError(self.url + path, reason, response.status)
        return self.decoded(path, response)

    def decoded(self, path: str, response: Response) -> dict[str, Any]:
        """Return the JSON object in a response. Raises ServerError."""
        try:
            reply: dict[str, Any] = msgspec.json.decode(response.content, type=dict[str, Any])
        except UNREADABLE as error:
            reason = f"not an OpenAI server's response: {error}"
            raise ServerError(self.url + path, reason, response.status) from error
        return reply

    async def _reason(self, error: Exception) -> str:
        """Return the reason of a failed request: the most likely mistake, if it is one."""
        causes = list(_causes(error))
        if any(isinstance(each, ConnectionRefusedError) for each in causes):
            return NOTHING_LISTENS
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes):
            return f"its certificate is not accepted ({error}): worker_ca_file names its authority"
        if any(isinstance(each, ssl.SSLError) for each in causes):
            return "does not speak TLS: http://?"
        if isinstance(error, httpx.ProtocolError) and await self._speaks_tls():
            return "speaks TLS: https://?"
        return str(error) or type(error).__name__

    async def _speaks_tls(self) -> bool:
        parts = urlsplit(self.url)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(TLS_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or 80, ssl=context
                )
                writer.close()
                return True
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

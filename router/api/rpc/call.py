"""One request from the bus, with its headers, and its response.

The case of header names does not matter:

| `Content-Type` | JSON, unless msgpack is given; the response has the same type |
| `authorization` | a bearer token, as over HTTP |
| `x-timeout-s` | how long the caller waits |
| `x-request-id`, `traceparent` | as over HTTP; so are those that `asked_with` reads |

An error has the same body as over HTTP, with its text and status in the headers of NATS services.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.msg import Msg

from router.api.errors import DeadlineExceededError
from router.api.rpc.codecs import JSON, codec_of
from router.api.rpc.responder import BusResponse
from router.errors import InvalidFieldError, KvRouterError
from router.protocol.commands import Command
from router.runtime.process.json_bodies import decode_body, with_warnings
from router.runtime.process.request_ids import ids_of
from router.runtime.security.caller import ANYBODY
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import identify
from router.runtime.security.route_scopes import BUS

UNKNOWN = "unknown"
TIMEOUT = "x-timeout-s"
MAX_TIMEOUT_S = 86_400.0


class RpcRequest:
    """A request: `open` it, then admit its caller. Errors are responses, too.

    `method`: the command, once it is read; `unknown`: unknown fields.
    """

    __slots__ = (
        "_headers",
        "_timeout_s",
        "_until_s",
        "caller",
        "codec",
        "headers",
        "ids",
        "method",
        "unknown",
    )

    def __init__(self, message: Msg) -> None:
        self._headers = message.headers
        self.method = UNKNOWN
        self.unknown: tuple[str, ...] = ()
        self.caller = ANYBODY
        self.headers: Mapping[str, str] = {
            name.lower(): value for name, value in (message.headers or {}).items()
        }
        self.ids = ids_of(self.headers)
        self.codec = JSON
        self._timeout_s: float | None = None
        self._until_s: float | None = None

    def open(self) -> None:
        """Read the headers. Raises UnsupportedMediaTypeError, InvalidFieldError."""
        self.codec = codec_of(self.headers.get("content-type"))
        self._timeout_s = _timeout_s(self.headers.get(TIMEOUT))
        if self._timeout_s is not None:
            self._until_s = asyncio.get_running_loop().time() + self._timeout_s

    def admit(self, guard: Guard) -> None:
        """Identify the caller. Raises what `Guard.identify` raises."""
        self.caller = identify(guard, self._headers)

    async def command(self, body: bytes, guard: Guard) -> Command:
        """Return the command. Raises MalformedBodyError, InvalidFieldError, ForbiddenError."""
        codec = self.codec
        envelope = await decode_body(codec.decode, body, f"valid {codec.media_type}")
        command, self.unknown = envelope.command, envelope.unknown
        self.method = str(command.__struct_config__.tag)
        guard.check_scope(self.caller, BUS, self.method)
        return command

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Cancel the body at the caller's timeout. Raises DeadlineExceededError."""
        if self._timeout_s is None:
            yield
            return
        try:
            async with asyncio.timeout_at(self._until_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(self._timeout_s) from error

    def answered(self, reply: Any) -> BusResponse:
        """Return the encoded reply."""
        headers = {"Content-Type": self.codec.media_type, **self.ids.answered()}
        return BusResponse(self.codec.encode(with_warnings(reply, self.unknown)), headers)

    def refused(self, error: KvRouterError) -> BusResponse:
        """Return the encoded error."""
        headers = {
            "Content-Type": self.codec.media_type,
            "Nats-Service-Error": " ".join(str(error).split()),
            "Nats-Service-Error-Code": str(error.http_status),
            **self.ids.answered(),
        }
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        return BusResponse(self.codec.encode({"method": "error", **error.body()}), headers)


def _timeout_s(text: str | None) -> float | None:
    """Return the caller's timeout, or None without one. Raises InvalidFieldError."""
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidFieldError(TIMEOUT, repr(text), f"seconds, above 0, at most {MAX_TIMEOUT_S:g}")
    return timeout_s

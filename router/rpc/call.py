"""One request from the bus: what its headers say, and what goes back. The headers, whatever their
case:

| `Content-Type` | JSON, unless it says msgpack; the answer has the same |
| `authorization` | a bearer token, as over HTTP |
| `x-timeout-s` | how long the caller waits |
| `x-request-id`, `traceparent` | as over HTTP; so are those that `asked_with` reads |

A refusal has HTTP's body, and says its text and status as NATS's services do.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.msg import Msg

from router.answering import BusAnswer
from router.errors import DeadlineExceededError, InvalidFieldError, KvRouterError
from router.process.bodies import decode_body
from router.process.fields import with_warnings
from router.process.request_ids import ids_of
from router.protocol.commands import Command
from router.rpc.codecs import JSON, codec_of
from router.security.caller import ANYBODY
from router.security.guard import Guard
from router.security.guarded import identify
from router.security.route_scopes import BUS

UNKNOWN = "unknown"
TIMEOUT = "x-timeout-s"
MAX_TIMEOUT_S = 86_400.0


class Call:
    """A request: `open` it, and then see whether its caller is admitted. What is wrong with it is
    an answer, too.

    `method`: what it asks, once that is read; `unknown`: fields that nobody knows.
    """

    __slots__ = (
        "_said",
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
        self._said = message.headers
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
        """Read its headers. Raises UnsupportedMediaTypeError, InvalidFieldError."""
        self.codec = codec_of(self.headers.get("content-type"))
        self._timeout_s = _timeout_s(self.headers.get(TIMEOUT))
        if self._timeout_s is not None:
            self._until_s = asyncio.get_running_loop().time() + self._timeout_s

    def admit(self, guard: Guard) -> None:
        """Who asks. Raises what `Guard.identify` raises."""
        self.caller = identify(guard, self._said)

    async def command(self, body: bytes, guard: Guard) -> Command:
        """What it asks. Raises MalformedBodyError, InvalidFieldError, ForbiddenError."""
        codec = self.codec
        said = await decode_body(codec.decode, body, f"valid {codec.media_type}")
        command, self.unknown = said.command, said.unknown
        self.method = str(command.__struct_config__.tag)
        guard.check_scope(self.caller, BUS, self.method)
        return command

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Ends what is done inside once the caller waits no more. Raises DeadlineExceededError."""
        if self._timeout_s is None:
            yield
            return
        try:
            async with asyncio.timeout_at(self._until_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(self._timeout_s) from error

    def answered(self, reply: Any) -> BusAnswer:
        """The reply, encoded."""
        headers = {"Content-Type": self.codec.media_type, **self.ids.answered()}
        return BusAnswer(self.codec.encode(with_warnings(reply, self.unknown)), headers)

    def refused(self, error: KvRouterError) -> BusAnswer:
        """The refusal, encoded."""
        headers = {
            "Content-Type": self.codec.media_type,
            "Nats-Service-Error": " ".join(str(error).split()),
            "Nats-Service-Error-Code": str(error.http_status),
            **self.ids.answered(),
        }
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        return BusAnswer(self.codec.encode({"method": "error", **error.body()}), headers)


def _timeout_s(said: str | None) -> float | None:
    """How long the caller waits. Raises InvalidFieldError."""
    if said is None:
        return None
    try:
        timeout_s = float(said)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidFieldError(TIMEOUT, repr(said), f"seconds, above 0, at most {MAX_TIMEOUT_S:g}")
    return timeout_s

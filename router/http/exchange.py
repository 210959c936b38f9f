"""One request of a hot route, read whole; and its answer, sent."""

from collections.abc import AsyncIterator, Awaitable
from functools import partial

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import BodyTooLargeError, ClientGoneError, UnsupportedMediaTypeError
from router.http.answers import Answer
from router.process.bodies import read_body
from router.security.caller import ANYBODY, Caller
from router.service_config import ServiceConfig
from router.waiters import Gone

_JSON = b"application/json"


class Exchange(Struct, frozen=True):
    """A request. `request_id`: from its path, empty where the path has none; `gone` returns when
    the caller has hung up. Fields of the body that nobody knows are added to `unknown`.
    """

    headers: dict[bytes, bytes]
    query_string: bytes
    request_id: str
    body: bytes
    gone: Gone
    caller: Caller = ANYBODY
    unknown: list[str] = []

    def header(self, name: bytes) -> str | None:
        """A header, by its name in lower case; of several the first."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def media_type(self) -> str:
        """Of the body, without parameters."""
        if self.headers.get(b"content-type") == _JSON:
            return "application/json"
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    def check_json(self) -> None:
        """Raises UnsupportedMediaTypeError where the body does not claim to be JSON."""
        if self.media_type != "application/json":
            raise UnsupportedMediaTypeError(self.header(b"content-type"))


async def read_exchange(
    scope: Scope, receive: Receive, request_id: str, config: ServiceConfig, caller: Caller
) -> Exchange:
    """A request with its body. Raises BodyTooLargeError (at once), BodyTimeoutError,
    ClientGoneError.
    """
    limit_bytes = config.body_limit_bytes
    length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    body = await read_body(_chunks(receive), limit_bytes, config.body_timeout_s)
    return whole_exchange(scope, receive, request_id, body, caller)


def whole_exchange(
    scope: Scope, receive: Receive, request_id: str, body: bytes, caller: Caller
) -> Exchange:
    """A request whose body is read."""
    headers, query_string = dict(reversed(scope["headers"])), scope["query_string"]
    return Exchange(headers, query_string, request_id, body, partial(_gone, receive), caller)


async def send_answer(answer: Answer, send: Send) -> None:
    """Send an answer whole."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(answer.body)),
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def answered_by(later: Awaitable[Answer]) -> ASGIApp:
    """An application for one request, whose answer is on its way."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send_answer(await later, send)

    return app


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        yield message.get("body", b"")
        is_more = message.get("more_body", False)

"""One request of a hot route, read whole, however it came; and its answer, sent."""

from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from router.body_errors import BodyTooLargeError, ClientGoneError, UnsupportedMediaTypeError
from router.http.answers import Answer
from router.process.bodies import read_body
from router.process.request_ids import REQUEST_ID, is_fit
from router.security.caller import ANYBODY, Caller
from router.service_config import ServiceConfig
from router.waiters import Gone

JSON, BINARY = "application/json", "application/octet-stream"
_JSON_BYTES = JSON.encode()
ID_HEADER = REQUEST_ID.encode()
_PLAIN = {
    b"accept",
    b"accept-encoding",
    b"connection",
    b"content-length",
    b"content-type",
    b"host",
    b"user-agent",
    ID_HEADER,
}

Pairs: TypeAlias = list[tuple[bytes, bytes]]


class Head(Struct):
    """What came before a body. `pairs`: headers in order, named in lower case; `headers`: of each
    name the first. `is_plain`: they say what body this is, and nothing of who asks for what, but an
    id of the request (`plain_id`), once and fit to be one.
    """

    method: str
    path: str
    query_string: bytes
    pairs: Pairs
    headers: dict[bytes, bytes]
    media_type: str
    is_plain: bool
    plain_id: str | None = None

    @classmethod
    def of(cls, method: str, path: str, query_string: bytes, pairs: Pairs) -> "Head":
        """A head with these headers."""
        headers = dict(reversed(pairs))
        media_type, is_plain = _media_type(headers), headers.keys() <= _PLAIN
        plain_id = None
        if is_plain and ID_HEADER in headers:
            plain_id = fit_id(headers[ID_HEADER])
            is_plain = plain_id is not None and sum(name == ID_HEADER for name, _ in pairs) == 1
        return cls(method, path, query_string, pairs, headers, media_type, is_plain, plain_id)

    def with_id(self, plain_id: str) -> "Head":
        """The same plain head, which says an id, of another request."""
        said = plain_id.encode()
        pairs = [(name, said if name == ID_HEADER else value) for name, value in self.pairs]
        headers = {**self.headers, ID_HEADER: said}
        return replace(self, pairs=pairs, headers=headers, plain_id=plain_id)

    @classmethod
    def of_scope(cls, scope: Scope) -> "Head":
        """The head of an ASGI request."""
        return cls.of(scope["method"], scope["path"], scope["query_string"], scope["headers"])


def fit_id(said: bytes) -> str | None:
    """The id of a request, if that can be one."""
    text = said.decode("latin-1")
    return text if is_fit(text) else None


class Exchange(Struct):
    """A request. `request_id`: from its path, empty where the path has none. Fields of the body
    that nobody knows are added to `unknown`.
    """

    head: Head
    request_id: str
    body: bytes
    receive: Receive
    caller: Caller = ANYBODY
    unknown: list[str] = []

    @property
    def gone(self) -> Gone:
        """Returns when the caller has hung up."""
        return partial(_gone, self.receive)

    def header(self, name: bytes) -> str | None:
        """A header, by its name in lower case; of several the first."""
        value = self.head.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def media_type(self) -> str:
        """Of the body, without parameters."""
        return self.head.media_type

    def check_json(self) -> None:
        """Raises UnsupportedMediaTypeError where the body does not claim to be JSON."""
        if self.media_type != JSON:
            raise UnsupportedMediaTypeError(self.header(b"content-type"))


def _media_type(headers: dict[bytes, bytes]) -> str:
    said = headers.get(b"content-type", b"")
    return JSON if said == _JSON_BYTES else said.decode("latin-1").partition(";")[0].strip().lower()


async def read_whole_body(head: Head, receive: Receive, config: ServiceConfig) -> bytes:
    """A body that is still coming. Raises BodyTooLargeError (at once), BodyTimeoutError,
    ClientGoneError.
    """
    limit_bytes = config.body_limit_bytes
    length = head.headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    return await read_body(_chunks(receive), limit_bytes, config.body_timeout_s)


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

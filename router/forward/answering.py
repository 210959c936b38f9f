"""The client's side of a request, over ASGI."""

from collections.abc import AsyncIterator

import msgspec
from starlette.types import Receive, Send

from router.errors import ClientGoneError, KvRouterError
from router.forward.headers import Pairs
from router.security.guarded import refusal_headers

_JSON = (b"content-type", b"application/json")


class ClientSide:
    """Who asked, and reads the answer. `has_started`: its head is out, and cannot be changed.

    A client that reads slowly is waited for.
    """

    __slots__ = ("_has_finished", "_receive", "_send", "has_started", "own_headers")

    def __init__(self, receive: Receive, send: Send, own_headers: Pairs) -> None:
        self._receive = receive
        self._send = send
        self.own_headers = own_headers
        self.has_started = self._has_finished = False

    async def start(self, status: int, headers: Pairs) -> None:
        """Send the head of an answer."""
        self.has_started = True
        pairs = [*headers, *self.own_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; returns when there is room for another."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The answer is whole."""
        self._has_finished = True
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send an answer at once."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self._has_finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, value: object, status: int = 200, headers: Pairs = ()) -> None:
        """The same, of a value."""
        await self.whole(status, [_JSON, *headers], msgspec.json.encode(value))

    async def refuse(self, error: KvRouterError) -> None:
        """Say why there is no answer, or no more of it."""
        if self.has_started:
            await self.write(b"data: " + msgspec.json.encode(refusal(error)) + b"\n\n")
            await self.finish()
            return
        await self.json(refusal(error), error.http_status, refusal_headers(error))

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of the request. Raises ClientGoneError."""
        is_more = True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            yield message.get("body", b"")
            is_more = message.get("more_body", False)

    async def until_gone(self) -> None:
        """Wait for it to hang up. Raises ClientGoneError if it has before its answer was whole."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._has_finished:
            raise ClientGoneError


def refusal(error: KvRouterError) -> dict[str, object]:
    """An error in the shape of OpenAI's."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    param = error.body().get("field")
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}

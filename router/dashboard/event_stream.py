"""An answer that goes on: server-sent events, while the caller listens."""

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dashboard.page_files import SECURITY_HEADERS
from router.dashboard.streams import Stream, Streams

STUCK_S = 30.0
"""Whoever takes so long to take a frame is hung up on."""


class EventStream(Response):
    """The frames of a stream, until it ends, or the caller is gone, or stuck."""

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, stream: Stream) -> None:
        super().__init__(headers={**SECURITY_HEADERS, "cache-control": "no-store"})
        del self.headers["content-length"]
        self._streams = streams
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send until the end."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            async with asyncio.TaskGroup() as group:
                gone = group.create_task(self._gone(receive))
                with suppress(TimeoutError):
                    await self._send_all(send)
                gone.cancel()
        finally:
            self._streams.leave(self._stream)

    async def _send_all(self, send: Send) -> None:
        while frame := await self._stream.take():
            async with asyncio.timeout(STUCK_S):
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._streams.leave(self._stream)
        self._stream.put(b"")

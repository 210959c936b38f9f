"""A response of server-sent events that lasts while the client is connected.

The viewers' streams, and the task that feeds them: one frame a second, equal for all.

    run ─ look, in slices ─▶ frame ─▶ each stream's slot for one frame ─▶ its connection
                                        │
                                        └ still occupied: it gets the complete state once free

A stream ends at the next frame after its token was removed, expired, or lost its scope.

Without viewers the board is looked at every `UNWATCHED_S`, so that it remembers what happened, and
nothing is encoded. The task never takes more than `SHARE` of a core: if a look takes long, the
interval grows.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dashboard.board.board import Board
from router.dashboard.page_files import SECURITY_HEADERS
from router.errors import KvRouterError

INTERVAL_S = 1.0
UNWATCHED_S = 5.0
SHARE = 0.02


class TooManyStreamsError(KvRouterError):
    """More viewers than the limit allows."""

    code = "too_many_streams"
    http_status = 503
    retry_after_s = 10.0

    def __init__(self, most: int) -> None:
        super().__init__(f"dashboard: too many viewers (allowed: {most}, max_dashboard_streams)")
        self.most = most


class Attend(Protocol):
    """A callback, as described in `Streams`."""

    def __call__(self, *, is_watched: bool) -> None:
        """Handle the arrival of the first viewer, or the departure of the last."""


class Stream:
    """The connection of a viewer.

    `wants_all`: True if it is new or missed a frame. `is_admitted`: returns whether it may go on.
    """

    __slots__ = ("_changed", "_frame", "is_admitted", "wants_all")

    def __init__(self, is_admitted: Callable[[], bool]) -> None:
        self.is_admitted = is_admitted
        self._changed = asyncio.Event()
        self._frame: bytes | None = None
        self.wants_all = True

    @property
    def has_frame(self) -> bool:
        """True while the last frame is still to be sent."""
        return self._frame is not None

    def put(self, frame: bytes) -> None:
        """Store the next frame; an empty one ends the stream."""
        self._frame = frame
        self._changed.set()

    async def take(self) -> bytes:
        """Return the next frame, once there is one; an empty one is the last."""
        await self._changed.wait()
        self._changed.clear()
        frame, self._frame = self._frame, None
        return frame or b""


class Streams:
    """The streams of a board, up to `most`, with totals of their cost.

    `attend` is called when the first viewer arrives, and when the last one has left.
    """

    def __init__(self, board: Board, most: int, attend: Attend) -> None:
        self._board = board
        self._attend = attend
        self._streams: set[Stream] = set()
        self._subscribed = asyncio.Event()
        self._is_closed = False
        self.most = most
        self.frames = self.frame_bytes = self.missed = 0
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def join(self, is_admitted: Callable[[], bool] = lambda: True) -> Stream:
        """Add a viewer; its stream ends at the first frame after `is_admitted` is False.

        Raises TooManyStreamsError.
        """
        if self._is_closed or len(self._streams) >= self.most:
            raise TooManyStreamsError(self.most)
        stream = Stream(is_admitted)
        if not self._streams:
            self._attend(is_watched=True)
        self._streams.add(stream)
        self._subscribed.set()
        return stream

    def leave(self, stream: Stream) -> None:
        """Remove a viewer; without effect if it is removed already."""
        if stream in self._streams:
            self._streams.remove(stream)
            if not self._streams:
                self._attend(is_watched=False)

    def close(self) -> None:
        """End all streams, and accept no more."""
        self._is_closed = True
        for stream in self._streams:
            stream.put(b"")

    async def run(self) -> None:
        """Look at the board, and produce frames for viewers, until cancelled."""
        while self.most:
            self._subscribed.clear()
            taken_s = await self._look()
            await self._rest(taken_s / SHARE)

    async def _rest(self, least_s: float) -> None:
        """Wait until the next look: for a time, or without viewers for the first one."""
        if self._streams:
            await asyncio.sleep(max(INTERVAL_S, least_s))
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._subscribed.wait(), max(UNWATCHED_S, least_s))

    async def _look(self) -> float:
        """Look at the board once; return the CPU time spent."""
        spent_s, before_s = 0.0, time.thread_time()
        for _ in self._board.look(time.monotonic()):
            spent_s += time.thread_time() - before_s
            await asyncio.sleep(0)
            before_s = time.thread_time()
        self._publish(time.time())
        spent_s += time.thread_time() - before_s
        self.spent_s += spent_s
        return spent_s

    def _publish(self, at: float) -> None:
        if not self._streams:
            self._board.sample(time.monotonic(), at)
            return
        frame = event(self._board.frame(time.monotonic(), at))
        whole: bytes | None = None
        for stream in self._streams:
            if not stream.is_admitted():
                stream.put(b"")
            elif stream.has_frame:
                stream.wants_all = True
                self.missed += 1
            elif stream.wants_all:
                whole = whole or event(self._board.whole(at))
                stream.wants_all = False
                self._put(stream, whole)
            else:
                self._put(stream, frame)

    def _put(self, stream: Stream, frame: bytes) -> None:
        self.frames += 1
        self.frame_bytes += len(frame)
        stream.put(frame)


def event(data: bytes) -> bytes:
    """Return a server-sent event with a line of JSON."""
    return b"data: " + data + b"\n\n"


STUCK_S = 30.0
"""The timeout for sending one frame; a slower client is disconnected."""


class EventStream(Response):
    """The frames of a stream, until it ends or the client is gone or stuck."""

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, stream: Stream) -> None:
        super().__init__(headers={**SECURITY_HEADERS, "cache-control": "no-store"})
        del self.headers["content-length"]
        self._streams = streams
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send frames until the end of the stream."""
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

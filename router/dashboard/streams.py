"""Who watches, and the task that looks for them: one frame a second, the same bytes for all.

    run ─ look, in slices ─▶ frame ─▶ each stream's place for one frame ─▶ its connection
                                        │
                                        └ not empty yet: it gets everything anew once it is

While nobody watches the task sleeps. It never takes more than `SHARE` of a processor: what takes
long is looked at less often.
"""

import asyncio
import time
from typing import Protocol

from router.dashboard.board import Board
from router.dashboard.errors import TooManyStreamsError

INTERVAL_S = 1.0
SHARE = 0.02


class Attend(Protocol):
    """See `Streams`."""

    def __call__(self, *, is_watched: bool) -> None:
        """Somebody watches, or nobody does."""


class Stream:
    """One who watches. `wants_all`: it is new, or missed something."""

    __slots__ = ("_frame", "_news", "wants_all")

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._frame: bytes | None = None
        self.wants_all = True

    @property
    def has_frame(self) -> bool:
        """Whether the last frame is still on its way."""
        return self._frame is not None

    def put(self, frame: bytes) -> None:
        """The next frame; empty: the last."""
        self._frame = frame
        self._news.set()

    async def take(self) -> bytes:
        """The next frame, once there is one; empty: there are no more."""
        await self._news.wait()
        self._news.clear()
        frame, self._frame = self._frame, None
        return frame or b""


class Streams:
    """The streams of a board, up to `most`. Counts what they cost. `attend` is told when somebody
    comes to watch, and when nobody does any more.
    """

    def __init__(self, board: Board, most: int, attend: Attend) -> None:
        self._board = board
        self._attend = attend
        self._streams: set[Stream] = set()
        self._somebody = asyncio.Event()
        self._is_closed = False
        self.most = most
        self.frames = self.frame_bytes = self.missed = 0
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def join(self) -> Stream:
        """Somebody comes to watch. Raises TooManyStreamsError."""
        if self._is_closed or len(self._streams) >= self.most:
            raise TooManyStreamsError(self.most)
        stream = Stream()
        self._streams.add(stream)
        self._somebody.set()
        return stream

    def leave(self, stream: Stream) -> None:
        """It watches no more."""
        self._streams.discard(stream)

    def close(self) -> None:
        """End every stream; nobody comes any more."""
        self._is_closed = True
        for stream in self._streams:
            stream.put(b"")

    async def run(self) -> None:
        """Look, while somebody watches, until cancelled."""
        while True:
            await self._somebody.wait()
            self._attend(is_watched=True)
            while self._streams:
                taken_s = await self._look()
                await asyncio.sleep(max(INTERVAL_S, taken_s / SHARE))
            self._somebody.clear()
            self._attend(is_watched=False)
            self._board.rest()

    async def _look(self) -> float:
        """One frame; the processor's time that it took."""
        spent_s, before_s = 0.0, time.thread_time()
        for _ in self._board.look(time.monotonic()):
            spent_s += time.thread_time() - before_s
            await asyncio.sleep(0)
            before_s = time.thread_time()
        self._tell(time.time())
        spent_s += time.thread_time() - before_s
        self.spent_s += spent_s
        return spent_s

    def _tell(self, at: float) -> None:
        frame = event(self._board.frame(time.monotonic(), at))
        whole: bytes | None = None
        for stream in self._streams:
            if stream.has_frame:
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
    """A server-sent event of a line of JSON."""
    return b"data: " + data + b"\n\n"

"""Writes of one loop iteration, made together at its end.

The kernel then wakes clients once the other requests of the iteration are read, so that fewer
iterations serve more requests: a fifth of the processor time of a short request. It takes one more
iteration, 10 µs. So the writes of a connection that was also the last one to write are not delayed:
no other connection has requests.
"""

import asyncio
from typing import Any

from router.runtime.http_server.overload import Overload

MOST_UNSENT_BYTES = 65_536
"""Limit of unwritten bytes of one connection; beyond it, they are written at once."""


class WriteBatch:
    """The transports with unwritten bytes, in `waiting`; `last`: the last one that had any.

    `overload` is updated with each iteration that has responses of several connections.
    """

    __slots__ = ("last", "overload", "waiting")

    def __init__(self, overload: Overload) -> None:
        self.overload = overload
        self.waiting: list[BatchedTransport] = []
        self.last: BatchedTransport | None = None

    def write(self) -> None:
        """Write all unwritten bytes."""
        waiting, self.waiting = self.waiting, []
        for transport in waiting:
            transport.flush()
        self.overload.end(len(waiting))


class BatchedTransport(asyncio.Transport):
    """A transport whose writes wait for the end of the loop iteration, in order."""

    __slots__ = (
        "_batch",
        "_loop",
        "_transport",
        "_unsent",
        "get_extra_info",
        "is_closing",
        "pause_reading",
        "resume_reading",
    )

    def __init__(
        self, transport: asyncio.Transport, batch: WriteBatch, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._batch = batch
        self._loop = loop
        self._unsent: bytes | bytearray = b""
        own: Any = self  # these need no Python function of their own
        own.get_extra_info, own.is_closing = transport.get_extra_info, transport.is_closing
        own.pause_reading, own.resume_reading = transport.pause_reading, transport.resume_reading

    def write(self, data: Any) -> None:
        """Write bytes at the end of this loop iteration, or now if no other connection writes."""
        if not self._unsent:
            batch = self._batch
            if batch.last is self:
                if not self.is_closing():
                    self._transport.write(data)
                return
            batch.last = self
            if not batch.waiting:
                batch.overload.begin()
                self._loop.call_soon(batch.write)
            batch.waiting.append(self)
            self._unsent = data  # most connections write once
        else:
            if isinstance(self._unsent, bytes):
                self._unsent = bytearray(self._unsent)
            self._unsent += data
        if len(self._unsent) > MOST_UNSENT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the unwritten bytes."""
        unsent, self._unsent = self._unsent, b""
        if unsent and not self.is_closing():
            self._transport.write(unsent)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not sent yet."""
        return self._transport.get_write_buffer_size() + len(self._unsent)

    def close(self) -> None:
        """Close the connection once all bytes are sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._unsent = b""
        self._transport.abort()

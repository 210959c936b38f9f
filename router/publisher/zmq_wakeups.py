"""One task woken by many ZMQ sockets, without a poller: an idle socket costs nothing.

A socket's file descriptor says that something has happened since somebody looked, once: so it is
looked at when it says so, and after whatever may have looked beside it: connecting and sending. A
socket that has something stays ready until whoever was woken has received all of it.
"""

import asyncio

import zmq

from router.process.moments import EARLY_S


class Wakeups:
    """Wakes the task that waits when one of its sockets may have messages. Of one event loop."""

    __slots__ = ("_is_awake", "_loop", "_ready", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: set[zmq.Socket[bytes]] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._is_awake = True

    @property
    def is_awake(self) -> bool:
        """Would the next wait end at once?"""
        return self._is_awake

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Be woken by a socket until it is removed, which has to be before it is closed."""
        self._loop.add_reader(socket.fileno(), self.look, socket)
        self.look(socket)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Not by this one any more."""
        self._loop.remove_reader(socket.fileno())
        self._ready.discard(socket)

    def look(self, socket: zmq.Socket[bytes]) -> None:
        """Take in what a socket's descriptor signals, which is quiet afterwards."""
        if int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._ready.add(socket)
            self.wake()

    def is_ready(self, socket: zmq.Socket[bytes]) -> bool:
        """May there be something to be received?"""
        return socket in self._ready

    def drained(self, socket: zmq.Socket[bytes]) -> None:
        """Nothing is there: receiving said so."""
        self._ready.discard(socket)

    def wake(self) -> None:
        """Wake the task, or let its next wait end at once."""
        self._is_awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until woken, or so long, or a little longer. Others run in between in any case."""
        if self._is_awake or timeout_s <= 0.0:
            await asyncio.sleep(0)
        else:
            self._waiter = self._loop.create_future()
            # Who is woken too early, and waits for the rest of it, goes round and round.
            timer = self._loop.call_later(timeout_s + EARLY_S, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._is_awake = False

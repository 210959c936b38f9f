"""One task woken by many ZMQ sockets, without a poller: an idle socket costs nothing.

A socket's file descriptor signals once that something has happened since the last check. So the
socket is checked after each signal, and after calls that may have consumed one: connecting and
sending. A socket with messages stays ready until the woken task has received all of them.
"""

import asyncio

import zmq

from router.runtime.process.ticks import EARLY_S


class Wakeups:
    """A wake-up of one waiting task by its sockets. It belongs to one event loop."""

    __slots__ = ("_is_awake", "_loop", "_ready", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: set[zmq.Socket[bytes]] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._is_awake = True

    @property
    def is_awake(self) -> bool:
        """True if the next wait would end at once."""
        return self._is_awake

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Add a socket that wakes the task; it must be removed before it is closed."""
        self._loop.add_reader(socket.fileno(), self.look, socket)
        self.look(socket)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Remove a socket."""
        self._loop.remove_reader(socket.fileno())
        self._ready.discard(socket)

    def look(self, socket: zmq.Socket[bytes]) -> None:
        """Read the state of a socket, which resets the signal of its descriptor."""
        if int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._ready.add(socket)
            self.wake()

    def is_ready(self, socket: zmq.Socket[bytes]) -> bool:
        """Return whether a socket may have messages."""
        return socket in self._ready

    def drained(self, socket: zmq.Socket[bytes]) -> None:
        """Mark a socket as empty, because receiving from it found nothing."""
        self._ready.discard(socket)

    def wake(self) -> None:
        """Wake the task, or let its next wait end at once."""
        self._is_awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until woken, or until `timeout_s` or a little more is over.

        Other tasks run in between in any case.
        """
        if self._is_awake or timeout_s <= 0.0:
            await asyncio.sleep(0)
        else:
            self._waiter = self._loop.create_future()
            # A task woken too early would wait for the rest again and again.
            timer = self._loop.call_later(timeout_s + EARLY_S, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._is_awake = False

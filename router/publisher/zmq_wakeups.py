"""One task woken by many ZMQ sockets, without a poller: an idle socket costs nothing.

A socket's file descriptor says that something has happened since somebody looked, once: so it is
looked at when it says so, and whoever is woken then receives until nothing is there.
"""

import asyncio

import zmq


class Wakeups:
    """Wakes the task that waits when one of its sockets may have messages. Of one event loop."""

    __slots__ = ("_is_awake", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_awake = True

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Be woken by a socket until it is removed, which has to be before it is closed."""
        self._loop.add_reader(socket.fileno(), self._woken_by, socket)
        self.wake()

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Not by this one any more."""
        self._loop.remove_reader(socket.fileno())

    def wake(self) -> None:
        """Wake the task, or let its next wait end at once: after a send, which may take in a sign
        of what came, and where messages were left unread.
        """
        self._is_awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until woken, or so long. Others run in between in any case."""
        if self._is_awake:
            await asyncio.sleep(0)
        else:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        self._is_awake = False

    def _woken_by(self, socket: zmq.Socket[bytes]) -> None:
        socket.get(zmq.EVENTS)  # Takes in what the descriptor signals, which is quiet afterwards.
        self.wake()

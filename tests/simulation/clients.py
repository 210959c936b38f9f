"""What publishers and readers see of a link: the protocols that the real adapters implement."""

from collections import deque
from contextlib import asynccontextmanager

from router.ingest.event_stream import Delivery, StreamState
from router.runtime.bus.errors import BusUnavailableError

SILENCE_S = 1.0


class SimulatedTransport:
    """Implements `Transport` over a link."""

    def __init__(self, link):
        self._link = link
        self._server = link.server

    async def append(self, subject, payload, *, expected_sequence, replaces_history=False):
        """See `Transport`."""
        return await self._link.request(
            lambda: self._server.append(subject, payload, expected_sequence, replaces_history)
        )

    async def last_sequence(self, subject):
        """See `Transport`; makes the stream where there is none."""
        return await self._link.request(lambda: self._server.ensure_log().last_of(subject))

    async def drop_before(self, subject, sequence):
        """See `Transport`."""
        await self._link.request(lambda: self._purge(subject, sequence))

    async def broadcast(self, subject, payload):
        """See `Transport`."""
        if not self._link.is_connected:
            raise BusUnavailableError("not connected")
        if self._link.is_open:
            self._server.tell(self._link, subject, payload)

    def _purge(self, subject, sequence):
        if self._server.log is None:
            raise BusUnavailableError("no stream")
        self._server.log.purge(subject, sequence)


class SimulatedStream:
    """Implements `StreamSource` over a link."""

    def __init__(self, link):
        self._link = link
        self._server = link.server

    async def state(self):
        """See `StreamSource`."""
        return await self._link.request(self._state)

    @asynccontextmanager
    async def consume(self, after_sequence, *, latest_only):
        """See `StreamSource`."""
        assert not latest_only
        consumer = await self._link.request(lambda: self._consumer(after_sequence))
        try:
            yield consumer
        finally:
            if consumer in self._server.consumers:
                self._server.consumers.remove(consumer)

    def _state(self):
        log = self._server.ensure_log()
        return StreamState(log.created, log.last_sequence)

    def _consumer(self, after_sequence):
        if self._server.log is None:
            raise BusUnavailableError("no stream")
        messages = self._server.log.after(after_sequence)
        consumer = SimulatedConsumer(self._link, len(messages))
        self._server.consumers.append(consumer)
        for message in messages:
            consumer.push(*message)
        return consumer


class SimulatedConsumer:
    """Implements `Consumer`: in order over one connection, until something is wrong with it."""

    def __init__(self, link, pending):
        self.link = link
        self.pending = pending
        self._left = pending
        self._loop = link.loop
        self._ready = deque()
        self._held = deque()
        self._sequence = 0
        self._due_s = 0.0
        self._error = None
        self._waiter = None

    def push(self, sequence, subject, payload):
        """The server sends a message; a slow client drops it, a confused one sees it twice."""
        left = self._left = max(self._left - 1, 0)
        if self.link.hits("drop_delivery"):
            self._sequence += 1
            return
        for _ in range(2 if self.link.hits("double_delivery") else 1):
            self._sequence += 1
            delivery = Delivery(subject, payload, {}, sequence, self._sequence, left)
            now_s = self._loop.time()
            self._due_s = max(self._due_s + 1e-6, now_s + self.link.delay_s("slow_delivery"))
            self._loop.call_at(self._due_s, self._arrive, delivery)

    def fail_soon(self):
        """No heartbeat comes any more."""
        silence_s = SILENCE_S - 0.4 * self.link.random.random()
        self._loop.call_later(silence_s, self._fail)

    def release(self):
        """The connection is back: what was on its way comes now, or not."""
        is_lost = bool(self._held) and self.link.random.random() < 0.5
        if not is_lost:
            self._ready.extend(self._held)
        self._held.clear()
        self._wake()

    async def next(self):
        """See `Consumer`."""
        while not self._ready:
            if self._error is not None:
                raise BusUnavailableError(self._error)
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._ready.popleft()

    def _arrive(self, delivery):
        if self.link.is_open and not self._held:
            self._ready.append(delivery)
            self._wake()
        else:
            self._held.append(delivery)

    def _fail(self):
        """Unless the connection came back in time, and the server still knows us."""
        if self.link.is_open and self in self.link.server.consumers:
            return
        self._error = "no heartbeat"
        self._wake()

    def _wake(self):
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

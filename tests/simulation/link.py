"""A client's connection to the server, and everything that can go wrong with it."""

import asyncio

from router.runtime.bus.errors import BusUnavailableError, LogConflictError, LogFullError

REQUEST_TIMEOUT_S = 5.0
RECONNECT_S = 0.3


class Link:
    """One client's connection. `rates`: how likely each fault is at the moment, by name."""

    def __init__(self, server, name, on_change=lambda _: None, on_announced=None):
        self.server = server
        self.name = name
        self.loop = server.loop
        self.random = server.random
        self.rates = {}
        self.is_partitioned = False
        self.is_connected = True
        self.is_closed = False
        self._on_change = on_change
        self._on_announced = on_announced
        self._opened = asyncio.Event()
        self._opened.set()
        server.links.append(self)
        if on_announced is not None:
            self._resync()

    @property
    def is_open(self):
        return self._opened.is_set()

    def hits(self, fault):
        """Does this fault happen now? Counted if so."""
        rate = self.rates.get(fault)
        if not rate or self.random.random() >= rate:
            return False
        self.server.counts[fault] += 1
        return True

    def delay_s(self, fault):
        delay_s = 0.0002 + 0.002 * self.random.random()
        if self.hits(fault):
            delay_s += self.random.expovariate(1 / 0.4)
        return delay_s

    def partition(self, is_partitioned):
        self.is_partitioned = is_partitioned
        self.changed()

    def close(self):
        """The client is gone; what it asked for and was not done yet never will be."""
        self.is_closed = True
        self._opened.clear()
        self.server.forget(self)

    def changed(self):
        """Reachability changed: closed at once, noticed later, open again later still."""
        if self._is_reachable:
            delay_s = 0.01 if self.is_connected else RECONNECT_S * (0.5 + self.random.random())
            self.loop.call_later(delay_s, self._reopen)
            return
        self._opened.clear()
        self.loop.call_later(0.5 + 4 * self.random.random(), self._notice)
        self._doom_consumers()

    def break_off(self):
        """The other end is gone, which shows at once."""
        self._opened.clear()
        self._doom_consumers()
        self._notice()

    def _doom_consumers(self):
        for consumer in self.server.consumers:
            if consumer.link is self:
                consumer.fail_soon()

    @property
    def _is_reachable(self):
        return self.server.is_up and not self.is_partitioned and not self.is_closed

    def _notice(self):
        if self.is_closed or self._is_reachable or not self.is_connected:
            return
        self.is_connected = False
        self.server.counts["disconnected"] += 1
        self.server.trace(self.name, "is disconnected")
        self._on_change(False)

    def _reopen(self):
        if not self._is_reachable or self.is_open:
            return
        self._opened.set()
        for consumer in self.server.consumers:
            if consumer.link is self:
                consumer.release()
        if not self.is_connected:
            self.server.trace(self.name, "is connected again")
            self.is_connected = True
            self._on_change(True)
        self._resync()

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    async def request(self, act):
        """Let the server act, and return what it says. Raises BusUnavailableError when in doubt."""
        deadline_s = self.loop.time() + REQUEST_TIMEOUT_S
        if self.hits("lose_request"):
            await self._time_out(deadline_s)
        if self.hits("late_request"):
            self.loop.call_later(self.random.random() * 7, self._act_late, act)
            await self._time_out(deadline_s)
        await self._travel()
        if not self.is_open:
            await self._wait_until_open(act, deadline_s)
        answer = act()
        if self.hits("lose_ack"):
            await self._time_out(deadline_s)
        await self._travel()
        if not self.is_open:
            self.server.counts["ack_cut_off"] += 1
            await self._time_out(deadline_s)
        return answer

    async def _wait_until_open(self, act, deadline_s):
        """The client holds what it cannot send; it may send it after its caller has given up."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._opened.wait()
        except TimeoutError:
            if self.random.random() < 0.5:
                self._held_request(act)
            raise BusUnavailableError("not connected") from None

    def _held_request(self, act):
        if self.is_open:
            self._act_late(act)
        elif not self.is_closed:
            self.loop.call_later(0.05, self._held_request, act)

    def _act_late(self, act):
        if not self.server.is_up:
            return
        try:
            act()
        except (BusUnavailableError, LogConflictError, LogFullError):
            self.server.counts["late_request_refused"] += 1
        else:
            self.server.counts["late_request_done"] += 1

    async def _travel(self):
        """Take the time of one way between client and server."""
        await asyncio.sleep(self.delay_s("slow_request"))

    async def _time_out(self, deadline_s):
        await asyncio.sleep(deadline_s - self.loop.time())
        raise BusUnavailableError("no answer in time")

    # ── Arrivals ─────────────────────────────────────────────────────────────────────────────────

    def arrive(self, callback, subject, payload):
        if self.is_open:
            callback(subject, payload)

    def notify(self, worker_id):
        """Report a new announcement to the watchers here."""
        if self._on_announced is not None:
            self.loop.call_later(self.delay_s("delay"), self._announced, worker_id)

    def _resync(self):
        if self._on_announced is not None:
            for worker_id in list(self.server.bucket):
                delay_s = 0.05 + self.random.random()
                self.loop.call_later(delay_s, self._announced, worker_id)

    def _announced(self, worker_id):
        if self.is_open and worker_id in self.server.bucket:
            self._on_announced(worker_id, self.server.bucket[worker_id])

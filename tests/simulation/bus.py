"""A NATS server in memory; `link.py` and `clients.py` are the ways to it.

    publisher ── Link ──┐                     ┌── Link ── StreamReader
      append, purge     ├──▶ Server: Log ─────┤     consumers, dropped on any doubt
      broadcast         │        subscribers ─┼── Link ── reports, beacons, requests
    agent ───── Link ───┘        bucket ──────┘     announcements

What can go wrong is a rate on a link (`Link.rates`, by fault) or a state of the server; every fault
that really happened is counted. Times are those of the real adapters.
"""

from collections import Counter

from router.runtime.bus.errors import BusUnavailableError, LogConflictError, LogFullError


class Log:
    """A JetStream stream: messages in one order, each the last of its subject until the next."""

    def __init__(self, created):
        self.created = created
        self.last_sequence = 0
        self.size_bytes = 0
        self._messages = {}
        self._of_subject = {}

    def last_of(self, subject):
        return next(reversed(self._of_subject.get(subject, {})), 0)

    def after(self, sequence):
        return [(s, *m) for s, m in self._messages.items() if s > sequence]

    def append(self, subject, payload):
        self.last_sequence += 1
        self._messages[self.last_sequence] = (subject, payload)
        self._of_subject.setdefault(subject, {})[self.last_sequence] = None
        self.size_bytes += len(payload)
        return self.last_sequence

    def purge(self, subject, before):
        for sequence in [s for s in self._of_subject.get(subject, ()) if s < before]:
            self._drop(sequence)

    def cut(self, messages):
        """Lose the last messages, as a machine does that dies before it writes them."""
        for sequence in sorted(self._messages)[-messages:]:
            self._drop(sequence)
        self.last_sequence = max(self._messages, default=0)

    def _drop(self, sequence):
        subject, payload = self._messages.pop(sequence)
        del self._of_subject[subject][sequence]
        self.size_bytes -= len(payload)


class Server:
    """The server, its store, and all connections. `counts`: faults that really happened."""

    def __init__(self, loop, random, trace):
        self.loop = loop
        self.random = random
        self.trace = trace
        self.counts = Counter()
        self.is_up = True
        self.log = None
        self.max_bytes = None
        self.bucket = {}
        self.links = []
        self.consumers = []
        self._listeners = {}
        self._created = 0

    # ── What is stored ───────────────────────────────────────────────────────────────────────────

    def ensure_log(self):
        if self.log is None:
            self._created += 1
            self.log = Log(self._created)
        return self.log

    def append(self, subject, payload, expected_sequence, replaces_history):
        """As JetStream does it: a full stream refuses even what would make room in it."""
        if self.log is None:
            raise BusUnavailableError("no stream")
        if expected_sequence is not None and self.log.last_of(subject) != expected_sequence:
            self.counts["conflict"] += 1
            self.trace("conflict", subject, "is not at", expected_sequence)
            raise LogConflictError(subject, expected_sequence)
        if self.max_bytes is not None and self.log.size_bytes + len(payload) > self.max_bytes:
            self.counts["refused_full"] += 1
            raise LogFullError(subject)
        sequence = self.log.append(subject, payload)
        self.trace("append", subject, "as", sequence, "alone" if replaces_history else "")
        if replaces_history:
            self.log.purge(subject, sequence)
        for consumer in self.consumers:
            consumer.push(sequence, subject, payload)
        return sequence

    def announce(self, worker_id, announcement):
        """Write to the bucket, or (None) withdraw, and let watchers know."""
        self.bucket[worker_id] = announcement
        for link in self.links:
            link.notify(worker_id)

    # ── What is only said ────────────────────────────────────────────────────────────────────────

    def listen(self, link, pattern, callback):
        """Call back with subject and payload until the link is closed. At the end `*.*`: any."""
        self._listeners.setdefault(pattern, []).append((link, callback))

    def forget(self, link):
        for listeners in self._listeners.values():
            listeners[:] = [each for each in listeners if each[0] is not link]
        self.consumers = [each for each in self.consumers if each.link is not link]
        self.links.remove(link)

    def tell(self, sender, subject, payload):
        """Core NATS: to every subscriber that can be reached."""
        wide = subject.rsplit(".", 2)[0] + ".*.*"
        for pattern in (subject, wide):
            for link, callback in self._listeners.get(pattern, ()):
                if sender.hits("lose") or link.hits("lose"):
                    continue
                copies = 2 if link.hits("double") else 1
                for _ in range(copies):
                    self.loop.call_later(
                        sender.delay_s("delay") + link.delay_s("delay"),
                        link.arrive,
                        callback,
                        subject,
                        payload,
                    )

    # ── What happens to it ───────────────────────────────────────────────────────────────────────

    def stop(self):
        self.is_up = False
        self.consumers, dropped = [], self.consumers
        for consumer in dropped:
            consumer.fail_soon()
        for link in self.links:
            link.break_off()

    def start(self):
        self.is_up = True
        for link in self.links:
            link.changed()

    def lose_store(self):
        self.log = None
        self.bucket = {}

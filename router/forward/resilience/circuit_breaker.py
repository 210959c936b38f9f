"""A circuit breaker per worker: after repeated failures a worker receives no requests for a while.

    closed ─failures in a row─▶ open ─time, and a successful probe─▶ half open ─success─▶ closed
                                 ▲                                        │
                                 └──────────── failure, twice as long ────┘

Pure: time is an argument, in seconds of a monotonic clock.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

State: TypeAlias = Literal["closed", "open", "half_open"]


class BreakerLimits(Struct, frozen=True):
    """Limits of the circuit breaker.

    `failures`: failures in a row that open it. `silent_probes`: unanswered probes in a row that
    open it. `open_s`: time it stays open at first; doubled by each further failure, up to
    `most_open_s`. `outlier_rate`: failure rate that opens it if others fail less than a third as
    often. `most_ejected`: limit of the ejected fraction of all workers. `forget_s`: idle time after
    which a record is deleted.
    """

    failures: int = 5
    silent_probes: int = 3
    open_s: float = 5.0
    most_open_s: float = 120.0
    outlier_rate: float = 0.5
    most_ejected: float = 0.5
    forget_s: float = 900.0


_WEIGHT = 0.1
"""Weight of the latest outcome in a worker's failure rate."""


class BreakerState:
    """One worker's record. `rate`: its recent failure rate, 0 to 1."""

    __slots__ = (
        "endpoint",
        "in_a_row",
        "last_seen_s",
        "open_for_s",
        "open_until_s",
        "rate",
        "silent",
        "state",
    )  # fmt: skip

    def __init__(self, endpoint: str, now_s: float) -> None:
        self.endpoint = endpoint
        self.last_seen_s = now_s
        self.in_a_row = self.silent = 0
        self.rate = 0.0
        self.state: State = "closed"
        self.open_for_s = 0.0
        self.open_until_s = 0.0


class CircuitBreaker:
    """The records of all workers that received requests."""

    __slots__ = ("_limits", "_opened", "_workers")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._workers: dict[int, BreakerState] = {}
        self._opened: set[int] = set()

    def succeeded(self, worker_id: int, endpoint: str, now_s: float) -> None:
        """Record a success."""
        worker = self._noted(worker_id, endpoint, now_s)
        worker.in_a_row = worker.silent = 0
        worker.rate -= _WEIGHT * worker.rate
        if worker.state == "half_open":
            worker.state, worker.open_for_s, worker.rate = "closed", 0.0, 0.0

    def failed(self, worker_id: int, endpoint: str, now_s: float) -> None:
        """Record a failure."""
        worker = self._noted(worker_id, endpoint, now_s)
        worker.in_a_row += 1
        worker.rate += _WEIGHT * (1 - worker.rate)
        is_due = worker.in_a_row >= self._limits.failures or self._is_outlier(worker)
        if worker.state == "half_open" or (worker.state == "closed" and is_due):
            self._open(worker_id, worker, now_s)

    def probed(self, worker_id: int, now_s: float, *, lives: bool) -> None:
        """Record a probe of an ejected worker; after a success it may be tried again."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.last_seen_s = now_s
        if worker.state == "open":
            worker.open_until_s = max(worker.open_until_s, now_s + (0 if lives else 1))
            if lives:
                worker.state, worker.in_a_row = "half_open", 0

    def checked(self, worker_id: int, endpoint: str, now_s: float, *, lives: bool) -> None:
        """Record a probe of a serving worker; a repeatedly silent one is ejected.

        This happens before a request has failed there.
        """
        worker = self._noted(worker_id, endpoint, now_s)
        worker.silent = 0 if lives else worker.silent + 1
        if worker.state != "open" and worker.silent >= self._limits.silent_probes:
            worker.silent = 0
            self._open(worker_id, worker, now_s)

    def ejected(self) -> list[int]:
        """Return the workers to avoid, sorted by id.

        Beyond the limit, those that stay open longest are returned.
        """
        if not self._opened:
            return []
        self._opened = {each for each in self._opened if self.state(each) == "open"}
        opened = sorted((-self._workers[each].open_until_s, each) for each in self._opened)
        most = int(self._limits.most_ejected * len(self._workers))
        return sorted(worker_id for _, worker_id in opened[:most])

    def to_probe(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Yield the ejected workers that may be probed now."""
        for worker_id, worker in self._workers.items():
            if worker.state == "open" and worker.open_until_s <= now_s:
                yield worker_id, worker.endpoint

    def forget(self, now_s: float) -> None:
        """Delete the records of workers without recent outcomes."""
        oldest_s = now_s - self._limits.forget_s
        for worker_id in [i for i, each in self._workers.items() if each.last_seen_s < oldest_s]:
            del self._workers[worker_id]

    def state(self, worker_id: int) -> State:
        """Return the state of a worker; an unknown one is closed."""
        worker = self._workers.get(worker_id)
        return "closed" if worker is None else worker.state

    def _noted(self, worker_id: int, endpoint: str, now_s: float) -> BreakerState:
        worker = self._workers.get(worker_id)
        if worker is None or worker.endpoint != endpoint:  # restarted elsewhere
            worker = self._workers[worker_id] = BreakerState(endpoint, now_s)
        worker.last_seen_s = now_s
        return worker

    def _is_outlier(self, worker: BreakerState) -> bool:
        others = [each.rate for each in self._workers.values() if each is not worker]
        mean = sum(others) / len(others) if others else 1.0
        return worker.rate >= self._limits.outlier_rate and worker.rate > 3 * mean

    def _open(self, worker_id: int, worker: BreakerState, now_s: float) -> None:
        self._opened.add(worker_id)
        longer_s = max(self._limits.open_s, 2 * worker.open_for_s)
        worker.open_for_s = min(longer_s, self._limits.most_open_s)
        worker.open_until_s = now_s + worker.open_for_s
        worker.state, worker.in_a_row = "open", 0

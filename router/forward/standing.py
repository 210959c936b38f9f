"""How workers stand: who is left alone for a while, because he failed again and again.

    closed ─failures in a row─▶ open ─time, and a probe that succeeds─▶ half open ─success─▶ closed
                                 ▲                                          │
                                 └──────────── failure, twice as long ──────┘

Pure: time is an argument, in seconds of a clock that never goes back.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

State: TypeAlias = Literal["closed", "open", "half_open"]


class StandingLimits(Struct, frozen=True):
    """`failures`: in a row, until a worker is left alone, for `open_s` at first, and twice as long
    each time that it fails again, up to `most_open_s`; `silent_probes`: the same, of those that
    were left unanswered. `outlier_rate`: of its latest requests, if
    others fail less than a third as often. At most `most_ejected` of all workers are left alone.
    """

    failures: int = 5
    silent_probes: int = 3
    open_s: float = 5.0
    most_open_s: float = 120.0
    outlier_rate: float = 0.5
    most_ejected: float = 0.5
    forget_s: float = 900.0


_WEIGHT = 0.1
"""Of the latest outcome in a worker's failure rate."""


class Worker:
    """One worker's record. `rate`: how often it failed of late, 0 to 1."""

    __slots__ = ("endpoint", "heard_s", "in_a_row", "open_for_s", "open_until_s", "rate", "silent",
                 "state")  # fmt: skip

    def __init__(self, endpoint: str, now_s: float) -> None:
        self.endpoint = endpoint
        self.heard_s = now_s
        self.in_a_row = self.silent = 0
        self.rate = 0.0
        self.state: State = "closed"
        self.open_for_s = 0.0
        self.open_until_s = 0.0


class Standing:
    """The records of all workers that requests were sent to."""

    __slots__ = ("_limits", "_opened", "_workers")

    def __init__(self, limits: StandingLimits) -> None:
        self._limits = limits
        self._workers: dict[int, Worker] = {}
        self._opened: set[int] = set()

    def succeeded(self, worker_id: int, endpoint: str, now_s: float) -> None:
        """It answered."""
        worker = self._noted(worker_id, endpoint, now_s)
        worker.in_a_row = worker.silent = 0
        worker.rate -= _WEIGHT * worker.rate
        if worker.state == "half_open":
            worker.state, worker.open_for_s, worker.rate = "closed", 0.0, 0.0

    def failed(self, worker_id: int, endpoint: str, now_s: float) -> None:
        """It did not."""
        worker = self._noted(worker_id, endpoint, now_s)
        worker.in_a_row += 1
        worker.rate += _WEIGHT * (1 - worker.rate)
        is_due = worker.in_a_row >= self._limits.failures or self._is_outlier(worker)
        if worker.state == "half_open" or (worker.state == "closed" and is_due):
            self._open(worker_id, worker, now_s)

    def probed(self, worker_id: int, now_s: float, *, lives: bool) -> None:
        """Whether it answered a probe; one that was left alone may then be tried again."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.heard_s = now_s
        if worker.state == "open":
            worker.open_until_s = max(worker.open_until_s, now_s + (0 if lives else 1))
            if lives:
                worker.state, worker.in_a_row = "half_open", 0

    def checked(self, worker_id: int, endpoint: str, now_s: float, *, lives: bool) -> None:
        """Whether one that nothing speaks against answered a probe: who is silent again and again
        is left alone before a request has failed there.
        """
        worker = self._noted(worker_id, endpoint, now_s)
        worker.silent = 0 if lives else worker.silent + 1
        if worker.state != "open" and worker.silent >= self._limits.silent_probes:
            worker.silent = 0
            self._open(worker_id, worker, now_s)

    def ejected(self) -> list[int]:
        """Who is to be left alone, in order: the longest first, and never too many."""
        if not self._opened:
            return []
        self._opened = {each for each in self._opened if self.state(each) == "open"}
        opened = sorted((-self._workers[each].open_until_s, each) for each in self._opened)
        most = int(self._limits.most_ejected * len(self._workers))
        return sorted(worker_id for _, worker_id in opened[:most])

    def to_probe(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Whom to probe: those whose time of being left alone is over."""
        for worker_id, worker in self._workers.items():
            if worker.state == "open" and worker.open_until_s <= now_s:
                yield worker_id, worker.endpoint

    def forget(self, now_s: float) -> None:
        """Those of whom nothing was heard for long."""
        oldest_s = now_s - self._limits.forget_s
        for worker_id in [i for i, each in self._workers.items() if each.heard_s < oldest_s]:
            del self._workers[worker_id]

    def state(self, worker_id: int) -> State:
        """How one stands; who is not known is closed: nothing speaks against him."""
        worker = self._workers.get(worker_id)
        return "closed" if worker is None else worker.state

    def _noted(self, worker_id: int, endpoint: str, now_s: float) -> Worker:
        worker = self._workers.get(worker_id)
        if worker is None or worker.endpoint != endpoint:  # another life, elsewhere
            worker = self._workers[worker_id] = Worker(endpoint, now_s)
        worker.heard_s = now_s
        return worker

    def _is_outlier(self, worker: Worker) -> bool:
        others = [each.rate for each in self._workers.values() if each is not worker]
        mean = sum(others) / len(others) if others else 1.0
        return worker.rate >= self._limits.outlier_rate and worker.rate > 3 * mean

    def _open(self, worker_id: int, worker: Worker, now_s: float) -> None:
        self._opened.add(worker_id)
        longer_s = max(self._limits.open_s, 2 * worker.open_for_s)
        worker.open_for_s = min(longer_s, self._limits.most_open_s)
        worker.open_until_s = now_s + worker.open_for_s
        worker.state, worker.in_a_row = "open", 0

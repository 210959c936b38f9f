"""The refusal of new work while an event loop has more requests than it answers in time.

An iteration of the loop reads a request of each connection that has sent any, and then writes all
responses. So an iteration with many responses is one for which many requests have waited.

    late, and all for LATE_FOR_S after it ─▶ overloaded ─▶ few refused in WINDOW_S ─▶ as before

A single late iteration is no overload, however long it was: the process may have been suspended.

While overloaded, an iteration admits new work for ADMITTING_S, and refuses the rest of it, so that
admitted requests are answered in time and callers can ask another router. What ends or reports
earlier work is never refused: it frees capacity.
"""

import time
from collections.abc import Callable
from math import inf

from router.errors import KvRouterError

MOST_WAITING, LATE_S = 512, 0.5
"""Requests of an iteration, and its duration in seconds; beyond either, it is late."""

LATE_FOR_S, ADMITTING_S, WINDOW_S = 0.1, 0.002, 1.0

FEW = 0.25
"""A share of new work. If less is refused in a window, the process can carry out the rest too, or
is soon overloaded again: at 1.5 times what it can carry out, it refuses half."""


class OverloadedError(KvRouterError):
    """The router has more requests than it can answer in time."""

    code = "overloaded"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__(
            "requests: more than this process answers in time "
            f"(allowed: at most {MOST_WAITING} that wait to be read)"
        )


class Overload:
    """The load of one event loop. `is_on`: it is overloaded."""

    __slots__ = (
        "_asked",
        "_begun_s",
        "_clock",
        "_ended_s",
        "_is_begun",
        "_late_since_s",
        "_refused",
        "_window_s",
        "is_on",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = self._ended_s = -inf
        self._late_since_s = inf
        self._window_s = 0.0
        self._asked = self._refused = 0
        self._is_begun = self.is_on = False

    def begin(self) -> None:
        """Record that an iteration has its first response."""
        self._is_begun, self._begun_s = True, self._clock()
        pause_s = self._begun_s - self._ended_s
        if pause_s > LATE_FOR_S:
            self._late_since_s = inf
        if pause_s > WINDOW_S:
            self.is_on = False

    def end(self, responses: int) -> None:
        """Record the end of an iteration, and the number of its responses."""
        self._is_begun = False
        now_s = self._ended_s = self._clock()
        if responses <= MOST_WAITING and now_s - self._begun_s <= LATE_S:
            self._late_since_s = inf
        elif self._late_since_s == inf:
            self._late_since_s = now_s
        if not self.is_on:
            self.is_on = now_s - self._late_since_s >= LATE_FOR_S
        elif now_s - self._window_s >= WINDOW_S:
            self.is_on = self._refused >= FEW * self._asked
        else:
            return
        self._window_s = now_s
        self._asked = self._refused = 0

    def check(self) -> None:
        """Raise OverloadedError if new work has to be refused now."""
        if not self.is_on:
            return
        self._asked += 1
        if self._is_begun and self._clock() - self._begun_s > ADMITTING_S:
            self._refused += 1
            raise OverloadedError

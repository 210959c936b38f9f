"""How often a process looks after the engines it follows: the more there are, the less often each.

Nothing here grows with engines × time: at any number of engines about 1,250 probes, 2,000 ticks and
500 attempts to connect a second are made at most, and what cannot be proven in time is `lagging`.

A few engines tick at the same moment: so one request is held up by them now and then, and not one
in fifty by one of them each.
"""

from itertools import count
from math import ceil

_PROBE_S, _PROBE_S_PER_ENGINE = 0.4, 0.0008
_TICK_S, _TICK_S_PER_ENGINE = 0.1, 0.0005
_RETRY_S, _RETRY_S_PER_ENGINE = 1.0, 0.002
_PATIENCE_S, _PATIENCE_S_PER_ENGINE = 2.0, 0.005
_FIRST_RETRY_S = 0.1

_TOGETHER, _APART_S = 16, 0.005
"""So many engines tick at the same moment, and the next ones so much later."""


class Pacing:
    """Intervals of all followers of one process. They count themselves in and out (`engines`), so
    that all of them slow down and speed up while they run. `numbers`: one for whoever ticks.
    """

    __slots__ = ("engines", "numbers")

    def __init__(self) -> None:
        self.engines = 0
        self.numbers = count()

    @property
    def probe_interval_s(self) -> float:
        """An engine of which nothing was heard for so long is probed.

        From 1,250 engines on that is more than a second, and idle ranks are `lagging` in between:
        nobody is called `exact` whose last proof of it is older.
        """
        return max(_PROBE_S, self.engines * _PROBE_S_PER_ENGINE)

    @property
    def tick_s(self) -> float:
        """So often something is done at least, due or not."""
        return max(_TICK_S, self.engines * _TICK_S_PER_ENGINE)

    def next_tick_s(self, number: int, now_s: float) -> float:
        """When whoever has this number ticks next: within `tick_s`, a few at the same moment."""
        tick_s, moments = self.tick_s, max(ceil(self.engines / _TOGETHER), 1)
        phase_s = number % moments * _APART_S
        ticks = (now_s - phase_s) // tick_s
        due_s = (ticks + 1) * tick_s + phase_s
        return due_s if due_s > now_s else due_s + tick_s  # where a quotient was rounded down

    @property
    def patience_s(self) -> float:
        """So long a connection may take to be made, and each answer of a replay to come."""
        return max(_PATIENCE_S, self.engines * _PATIENCE_S_PER_ENGINE)

    def retry_s(self, failures: int) -> float:
        """After so many failures in a row the next attempt to connect is this far away."""
        most_s = max(_RETRY_S, self.engines * _RETRY_S_PER_ENGINE)
        return min(_FIRST_RETRY_S * 2.0 ** min(failures, 16), most_s)

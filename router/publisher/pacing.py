"""How often a process looks after the engines it follows: the more there are, the less often each.

Nothing here grows with engines × time: at any number of engines about 1,250 probes, 2,000 ticks and
500 attempts to connect a second are made at most, and what cannot be proven in time is `lagging`.
"""

_PROBE_S, _PROBE_S_PER_ENGINE = 0.4, 0.0008
_TICK_S, _TICK_S_PER_ENGINE = 0.1, 0.0005
_RETRY_S, _RETRY_S_PER_ENGINE = 1.0, 0.002
_PATIENCE_S, _PATIENCE_S_PER_ENGINE = 2.0, 0.005
_FIRST_RETRY_S = 0.1


class Pacing:
    """Intervals of all followers of one process. They count themselves in and out (`engines`), so
    that all of them slow down and speed up while they run.
    """

    __slots__ = ("engines",)

    def __init__(self) -> None:
        self.engines = 0

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

    @property
    def patience_s(self) -> float:
        """So long a connection may take to be made, and each answer of a replay to come."""
        return max(_PATIENCE_S, self.engines * _PATIENCE_S_PER_ENGINE)

    def retry_s(self, failures: int) -> float:
        """After so many failures in a row the next attempt to connect is this far away."""
        most_s = max(_RETRY_S, self.engines * _RETRY_S_PER_ENGINE)
        return min(_FIRST_RETRY_S * 2.0 ** min(failures, 16), most_s)

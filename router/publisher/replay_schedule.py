"""When to ask an engine for a replay: after a failure, and when it is idle."""

from msgspec import Struct

PROBE_INTERVAL_S = 0.4
"""An engine of which nothing was heard for so long is probed. More than half a second, and an idle
engine's rank may now and then be `lagging`: nobody is called `exact` whose last proof of it is
older than one second.
"""


class ReplayTimes(Struct, frozen=True):
    """Intervals after failures."""

    backoff_s: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    """After so many failures in a row it is given up."""
    retry_given_up_s: float = 30.0


class ReplaySchedule:
    """Due times of one engine's replays."""

    __slots__ = ("_asked_s", "_failures", "_live_s", "_retry_s", "_times")

    def __init__(self, times: ReplayTimes, now_s: float) -> None:
        self._times = times
        self._failures = 0
        self._asked_s = self._live_s = self._retry_s = now_s

    def live(self, now_s: float) -> None:
        """A live batch came."""
        self._live_s = now_s

    @property
    def asked_s(self) -> float:
        """When the last replay was asked for."""
        return self._asked_s

    def asked(self, now_s: float) -> None:
        """A replay was asked for."""
        self._asked_s = now_s

    def succeeded(self) -> None:
        """Failures so far do not count any more."""
        self._failures = 0

    def failed(self, now_s: float) -> bool:
        """Note one more failure; False if that was one too many."""
        self._failures += 1
        if self._failures > len(self._times.backoff_s):
            return False
        self._retry_s = now_s + self._times.backoff_s[self._failures - 1]
        return True

    def given_up(self, now_s: float) -> None:
        """Try again much later, once."""
        self._failures = len(self._times.backoff_s)
        self._retry_s = now_s + self._times.retry_given_up_s

    @property
    def retry_due_s(self) -> float:
        """When it is time for the next attempt after a failure."""
        return self._retry_s

    def probe_due_s(self, interval_s: float) -> float:
        """When it is time to see whether an idle engine still is the one it was."""
        return max(self._live_s, self._asked_s) + interval_s

"""The times at which an engine receives a replay request: after a failure, and when it is idle."""

from msgspec import Struct

PROBE_INTERVAL_S = 0.4
"""The time of silence after which an engine is probed. With more than half a second, an idle
engine's rank may be `lagging` now and then: no rank is `exact` if its last proof is older than one
second.
"""


class ReplayTimes(Struct, frozen=True):
    """The intervals after failures."""

    backoff_s: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    """Delays after consecutive failures; after the last one the engine is given up."""
    retry_given_up_s: float = 30.0


class ReplaySchedule:
    """The due times of one engine's replays."""

    __slots__ = ("_asked_s", "_failures", "_live_s", "_retry_s", "_times")

    def __init__(self, times: ReplayTimes, now_s: float) -> None:
        self._times = times
        self._failures = 0
        self._asked_s = self._live_s = self._retry_s = now_s

    def live(self, now_s: float) -> None:
        """Record that a live batch was received."""
        self._live_s = now_s

    @property
    def asked_s(self) -> float:
        """The time of the last request for a replay."""
        return self._asked_s

    def replay_requested(self, now_s: float) -> None:
        """Record a request for a replay."""
        self._asked_s = now_s

    def succeeded(self) -> None:
        """Reset the number of failures."""
        self._failures = 0

    def failed(self, now_s: float) -> bool:
        """Record a failure. Returns False if there are too many in a row."""
        self._failures += 1
        if self._failures > len(self._times.backoff_s):
            return False
        self._retry_s = now_s + self._times.backoff_s[self._failures - 1]
        return True

    def given_up(self, now_s: float) -> None:
        """Schedule a single attempt after a long delay."""
        self._failures = len(self._times.backoff_s)
        self._retry_s = now_s + self._times.retry_given_up_s

    @property
    def retry_due_s(self) -> float:
        """The time of the next attempt after a failure."""
        return self._retry_s

    def probe_due_s(self, interval_s: float) -> float:
        """Return the time at which an idle engine is probed for a new life."""
        return max(self._live_s, self._asked_s) + interval_s

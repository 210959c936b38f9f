"""Timeouts and retries of a client."""

from collections.abc import Callable
from random import Random

from msgspec import Struct


class Retries(Struct, frozen=True):
    """The number of attempts and the delays between them, which double and have random length.

    A time to retry that the router gives is observed; if it exceeds the longest delay, there is no
    further attempt.
    """

    attempts: int = 4
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0

    def pause_s(self, attempt: int, retry_after_s: float | None, random: Random) -> float | None:
        """Return the delay after this attempt, from 1. Returns None if it is the last one."""
        wanted_s = retry_after_s or 0.0
        if attempt >= self.attempts or wanted_s > self.longest_pause_s:
            return None
        bound_s = min(self.first_pause_s * 2 ** (attempt - 1), self.longest_pause_s)
        return wanted_s + random.uniform(0, bound_s)


class Patience(Struct, frozen=True):
    """Limits of one attempt: `timeout_s` until a response or a report that it waits.

    `wait_s`: the additional time of a request that waits.
    """

    timeout_s: float
    wait_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The longest duration of an attempt."""
        return self.timeout_s + self.wait_s


def no_headers() -> dict[str, str]:
    """Return no headers."""
    return {}


class ClientSettings(Struct, frozen=True, kw_only=True):
    """The settings of a client.

    `timeout_s`: for each attempt. `max_wait_s`: the additional time of bookings that wait, unless
    the request has its own. `headers`: returns headers of each request, such as the current
    `traceparent`. `follow_reports`: limit of queued reports of all reservations; beyond it, the
    newest is dropped.
    """

    timeout_s: float = 5.0
    max_wait_s: float = 60.0
    retries: Retries = Retries()
    headers: Callable[[], dict[str, str]] = no_headers
    follow_reports: int = 16_384

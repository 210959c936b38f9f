"""How patient a client is."""

from collections.abc import Callable
from random import Random

from msgspec import Struct


class Retries(Struct, frozen=True):
    """What goes wrong is tried again, so often, after pauses that double, each of random length.

    A router that says when to ask again is not asked earlier; if that is later than the longest
    pause, it is not asked again.
    """

    attempts: int = 4
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0

    def pause_s(self, attempt: int, retry_after_s: float | None, random: Random) -> float | None:
        """How long to wait after this attempt, from 1; None: there is no next."""
        wanted_s = retry_after_s or 0.0
        if attempt >= self.attempts or wanted_s > self.longest_pause_s:
            return None
        bound_s = min(self.first_pause_s * 2 ** (attempt - 1), self.longest_pause_s)
        return wanted_s + random.uniform(0, bound_s)


class Patience(Struct, frozen=True):
    """With one attempt: `timeout_s` until it is answered, or known to wait; `wait_s` more then."""

    timeout_s: float
    wait_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The longest that it may take."""
        return self.timeout_s + self.wait_s


def no_headers() -> dict[str, str]:
    """Where nothing is to be said beside the request."""
    return {}


class ClientSettings(Struct, frozen=True, kw_only=True):
    """`timeout_s`: for each attempt; a booking may wait `max_wait_s` longer, which is what requests
    wait that do not say it. `headers`: of every request, such as the `traceparent` of this moment.
    `follow_reports`: of all reservations, that may wait to be sent; beyond, the newest is dropped.
    """

    timeout_s: float = 5.0
    max_wait_s: float = 60.0
    retries: Retries = Retries()
    headers: Callable[[], dict[str, str]] = no_headers
    follow_reports: int = 16_384

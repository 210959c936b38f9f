"""What passes through an engine: averages over its last minute of load reports."""

import math

from router.protocol.loads import LoadCounters

MEMORY_S = 60.0
"""After so long what was counted weighs 1 / e."""


class Traffic:
    """Sums that fade. Every answer is 0 where nothing was counted to divide by."""

    __slots__ = (
        "_cached_tokens",
        "_computed_tokens",
        "_elapsed_s",
        "_finished",
        "_generated_tokens",
        "_prefill_s",
        "_received",
    )

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._received = 0.0
        self._finished = 0.0
        self._generated_tokens = 0.0
        self._cached_tokens = 0.0
        self._computed_tokens = 0.0
        self._prefill_s = 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests received."""
        return _ratio(self._received, self._elapsed_s)

    @property
    def prefill_share(self) -> float:
        """Time spent on prompts, as a share of all."""
        return _ratio(self._prefill_s, self._elapsed_s)

    @property
    def output_tokens(self) -> float:
        """Tokens that a request generates."""
        return _ratio(self._generated_tokens, self._finished)

    @property
    def reuse(self) -> float:
        """Prompt tokens found cached for each one computed."""
        return _ratio(self._cached_tokens, self._computed_tokens)

    def add(self, counted: LoadCounters, prefill_s: float, elapsed_s: float) -> None:
        """What was counted in so long, and how long its prompts took."""
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._elapsed_s = self._elapsed_s * kept + elapsed_s
        self._received = self._received * kept + counted.requests_received
        self._finished = self._finished * kept + counted.requests_finished
        self._generated_tokens = self._generated_tokens * kept + counted.decode_requests
        self._cached_tokens = self._cached_tokens * kept + counted.cached_tokens
        self._computed_tokens = self._computed_tokens * kept + counted.prefill_tokens
        self._prefill_s = self._prefill_s * kept + prefill_s


class Excess:
    """What a report has more (or less) than we booked, as far as it lasts.

    Reports and bookings are never of the same moment: what was booked since is in no report yet,
    what ended since still is. Such differences come and go; of what the last few reports agree on,
    the least is believed. Bookings that no report has had time to contain are so never taken away.
    """

    __slots__ = ("_recent",)

    REPORTS = 3

    def __init__(self) -> None:
        self._recent: list[float] = []

    def note(self, excess: float) -> float:
        """The excess of the newest report; what lasts of it."""
        recent = self._recent = [*self._recent[1 - self.REPORTS :], excess]
        if len(recent) < self.REPORTS:
            return 0.0
        least, most = min(recent), max(recent)
        return least if least > 0 else min(most, 0.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

"""The traffic of an engine: averages over the last minute of load reports."""

import math

from router.protocol.loads import LoadCounters
from router.sequence.rank_table import TRAFFIC_MEMORY_S


class Traffic:
    """Decayed sums. Every ratio is 0 if its divisor is 0."""

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
        """Requests received per second."""
        return _ratio(self._received, self._elapsed_s)

    @property
    def prefill_share(self) -> float:
        """Fraction of the time spent on prompts."""
        return _ratio(self._prefill_s, self._elapsed_s)

    @property
    def output_tokens(self) -> float:
        """Mean number of tokens generated per request."""
        return _ratio(self._generated_tokens, self._finished)

    @property
    def reuse(self) -> float:
        """Prompt tokens found cached, per token computed."""
        return _ratio(self._cached_tokens, self._computed_tokens)

    def add(self, counted: LoadCounters, prefill_s: float, elapsed_s: float) -> None:
        """Add the work counted in `elapsed_s`; its prompts took `prefill_s`."""
        kept = math.exp(-elapsed_s / TRAFFIC_MEMORY_S)
        self._elapsed_s = self._elapsed_s * kept + elapsed_s
        self._received = self._received * kept + counted.requests_received
        self._finished = self._finished * kept + counted.requests_finished
        self._generated_tokens = self._generated_tokens * kept + counted.decode_requests
        self._cached_tokens = self._cached_tokens * kept + counted.cached_tokens
        self._computed_tokens = self._computed_tokens * kept + counted.prefill_tokens
        self._prefill_s = self._prefill_s * kept + prefill_s


class PromptContexts:
    """The mean context of the prompt tokens that were computed last, by the router's own bookings.

    `mean_tokens`: None until a prompt was complete. Engines count no contexts. Those of prompts
    differ a hundredfold, and those of other prompts would make the attention look cheaper than it
    is: an error in the amount of work always does.
    """

    __slots__ = ("_completed", "mean_tokens")

    def __init__(self) -> None:
        self._completed = (0.0, 0.0)
        self.mean_tokens: float | None = None

    def note(self, tokens: float, contexts: float) -> None:
        """Compare the sums of all completed prompts with those at the last call."""
        before_tokens, before_contexts = self._completed
        self._completed = (tokens, contexts)
        if tokens > before_tokens:
            self.mean_tokens = (contexts - before_contexts) / (tokens - before_tokens)


class Excess:
    """The lasting difference between an engine's reports and our bookings, in either direction.

    Reports and bookings are never of the same moment: requests booked since are not in the report
    yet, and requests that ended since still are. Such differences are transient, so that only the
    smallest of the last few reports counts. Bookings too recent for any report are thus never
    subtracted.
    """

    __slots__ = ("_recent",)

    REPORTS = 3

    def __init__(self) -> None:
        self._recent: list[float] = []

    def note(self, excess: float) -> float:
        """Record the difference of the newest report. Returns the lasting difference."""
        recent = self._recent = [*self._recent[1 - self.REPORTS :], excess]
        if len(recent) < self.REPORTS:
            return 0.0
        least, most = min(recent), max(recent)
        return least if least > 0 else min(most, 0.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

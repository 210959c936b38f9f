"""Decoding requests that grow between reports, because their callers report them in batches."""

from collections.abc import Iterator

from router.sequence.active.active_sequences import BookingId


class InferredOutput:
    """The decoding requests of one rank, and the time of the last report about each.

    Invariant: `since_s` is the sum of these times.
    """

    __slots__ = ("_reported_s", "since_s")

    def __init__(self) -> None:
        self._reported_s: dict[BookingId, float] = {}
        self.since_s = 0.0

    def __len__(self) -> int:
        return len(self._reported_s)

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in self._reported_s

    def __iter__(self) -> Iterator[BookingId]:
        return iter(self._reported_s)

    def note(self, request_id: BookingId, now_s: float) -> None:
        """Record a report about a request. Its output grows unreported from `now_s` on."""
        self.since_s += now_s - self._reported_s.get(request_id, 0.0)
        self._reported_s[request_id] = now_s

    def drop(self, request_id: BookingId) -> None:
        """Remove a request that ended. Has no effect if it is not here."""
        self.since_s -= self._reported_s.pop(request_id, 0.0)
        if not self._reported_s:
            self.since_s = 0.0  # Removes the rounding error of the running sum.

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(requests)."""
        assert abs(self.since_s - sum(self._reported_s.values())) < 1e-6


MEMORY = 0.99
"""The decay of the moving average per ended request."""

USUAL = 0.1
"""The share of requests that usually end for other reasons before their prompt is computed."""


class InferredPrefillEnd:
    """The moving share of ended requests without a report of their completed prompt."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = 0.0

    @property
    def is_usual(self) -> bool:
        """True if completion reports cannot be relied upon."""
        return self._share > USUAL

    def note(self, *, is_reported: bool) -> None:
        """Record the end of a request; `is_reported`: its completed prompt was reported."""
        self._share = MEMORY * self._share + (1 - MEMORY) * (not is_reported)

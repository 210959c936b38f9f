"""Requests that grow untold: their callers report many of them in one call, from time to time."""

from collections.abc import Iterator

from router.sequence.active import BookingId


class Growth:
    """Those of one rank that decode, and when each was last spoken of.

    Invariant: `since_s` is the sum of these times.
    """

    __slots__ = ("_told_s", "since_s")

    def __init__(self) -> None:
        self._told_s: dict[BookingId, float] = {}
        self.since_s = 0.0

    def __len__(self) -> int:
        return len(self._told_s)

    def __contains__(self, request_id: BookingId) -> bool:
        return request_id in self._told_s

    def __iter__(self) -> Iterator[BookingId]:
        return iter(self._told_s)

    def note(self, request_id: BookingId, now_s: float) -> None:
        """What was said of a request is true now, and grows untrue from now on."""
        self.since_s += now_s - self._told_s.get(request_id, 0.0)
        self._told_s[request_id] = now_s

    def drop(self, request_id: BookingId) -> None:
        """A request ended; one that is not here is passed over."""
        self.since_s -= self._told_s.pop(request_id, 0.0)
        if not self._told_s:
            self.since_s = 0.0  # without what rounding left

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(requests)."""
        assert abs(self.since_s - sum(self._told_s.values())) < 1e-6

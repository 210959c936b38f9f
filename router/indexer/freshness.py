"""How old what the index shows of a rank can be, by the router's own clock.

A report proves a fact for good: as of some moment, the rank's last event was this one. Where the
index stands at that event or behind it, it has shown the rank as it was at that moment or later.
"""

FRESH_S = 1.0
"""How old the proof may be on which a rank is called exact."""


class Freshness:
    """What one rank's reports have proven.

    `reported_event_id`: the last event that a report of this life has told of.
    """

    __slots__ = ("_as_of_s", "_awaited_event_id", "_awaited_s", "reported_event_id")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin a new life, of which nothing is proven."""
        self.reported_event_id = 0
        self._as_of_s = float("-inf")
        self._awaited_event_id = 0
        self._awaited_s = float("-inf")

    def note(self, event_id: int, as_of_s: float, cursor: int) -> None:
        """Note that as of this moment the rank's last event was this one."""
        self._settle(cursor)
        self.reported_event_id = max(self.reported_event_id, event_id)
        if event_id <= cursor:
            self._as_of_s = max(self._as_of_s, as_of_s)
        elif as_of_s - self._awaited_s > FRESH_S or self._awaited_event_id <= cursor:
            self._awaited_event_id, self._awaited_s = event_id, as_of_s

    def as_of_s(self, cursor: int) -> float:
        """The latest moment as of which an index that stands there is proven to be right."""
        if self._awaited_s > self._as_of_s:
            self._settle(cursor)
        return self._as_of_s

    def _settle(self, cursor: int) -> None:
        """What was awaited is proven once the index has come so far."""
        if self._awaited_event_id <= cursor:
            self._as_of_s = max(self._as_of_s, self._awaited_s)

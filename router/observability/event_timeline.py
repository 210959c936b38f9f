"""The last notable events, such as faults and repairs, newest last.

Events are added where they are logged and counted. Repetitions within seconds share one entry with
a count.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

CAPACITY = 256
AGAIN_S = 10.0
"""Interval within which a repeated event counts as the same entry, in seconds."""

Severity: TypeAlias = Literal["good", "note", "warning", "fault"]


class TimelineEntry(Struct, frozen=True):
    """An event; `kind` is for programs.

    `about`: the rank, worker or router concerned; empty: this router. `at`: time of the last
    occurrence, in seconds since 1970; `count`: number of occurrences; `revision` grows with every
    change of any entry.
    """

    entry_id: int
    revision: int
    at: float
    kind: str
    severity: Severity
    about: str
    text: str
    count: int = 1


class EventTimeline:
    """The last `CAPACITY` entries; the oldest are dropped. `clock`: seconds since 1970."""

    __slots__ = ("_clock", "_entries", "_revision")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str, str], TimelineEntry] = OrderedDict()
        self._revision = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, kind: str, severity: Severity, about: object, text: str, count: int = 1) -> None:
        """Add `count` occurrences of an event. O(1)."""
        at, key = self._clock(), (kind, str(about), text)
        self._revision += 1
        known = self._entries.pop(key, None)
        if known is not None and at - known.at < AGAIN_S:
            self._entries[key] = replace(
                known, revision=self._revision, at=at, count=known.count + count
            )
            return
        self._entries[key] = TimelineEntry(
            self._revision, self._revision, at, kind, severity, str(about), text, count
        )
        if len(self._entries) > CAPACITY:
            self._entries.popitem(last=False)

    def since(self, revision: int) -> Iterable[TimelineEntry]:
        """Return entries added or changed since `revision`, oldest first; 0: all. O(entries)."""
        return [each for each in self._entries.values() if each.revision > revision]

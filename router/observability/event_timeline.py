"""The last notable events, such as faults and repairs, newest last.

Events are added where they are logged and counted. Repetitions within seconds share one entry with
a count.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

FAULTS = 200
OTHERS = 100
"""The limits of entries: of faults and warnings, which others do not displace, and of others."""

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
    """The last `FAULTS` and `OTHERS`; the oldest are dropped. `clock`: seconds since 1970."""

    __slots__ = ("_clock", "_faults", "_others", "_revision")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._faults: OrderedDict[tuple[str, str, str], TimelineEntry] = OrderedDict()
        self._others: OrderedDict[tuple[str, str, str], TimelineEntry] = OrderedDict()
        self._revision = 0

    def __len__(self) -> int:
        return len(self._faults) + len(self._others)

    def note(self, kind: str, severity: Severity, about: object, text: str, count: int = 1) -> None:
        """Add `count` occurrences of an event. O(1)."""
        at, key = self._clock(), (kind, str(about), text)
        self._revision += 1
        is_fault = severity in ("fault", "warning")
        entries, most = (self._faults, FAULTS) if is_fault else (self._others, OTHERS)
        known = entries.pop(key, None)
        if known is not None and at - known.at < AGAIN_S:
            entries[key] = replace(known, revision=self._revision, at=at, count=known.count + count)
            return
        entries[key] = TimelineEntry(
            self._revision, self._revision, at, kind, severity, str(about), text, count
        )
        if len(entries) > most:
            entries.popitem(last=False)

    def since(self, revision: int) -> Iterable[TimelineEntry]:
        """Return entries added or changed since `revision`, oldest first; 0: all. O(entries)."""
        entries = (*self._faults.values(), *self._others.values())
        newer = (each for each in entries if each.revision > revision)
        return sorted(newer, key=lambda each: each.revision)

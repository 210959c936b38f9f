"""What went wrong, and what was done about it: the last events worth a look, newest last.

Noted where they are logged and counted. What happens again within seconds is one entry that counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

CAPACITY = 256
AGAIN_S = 10.0
"""The same, so soon after, is the same entry."""

Severity: TypeAlias = Literal["good", "note", "warning", "fault"]


class Happened(Struct, frozen=True):
    """An event: `kind` for programs, `about` whom (a rank, a worker, a router; empty: this one).

    `at`: seconds since 1970, of its last time; `count`: how often; `revision` grows with every
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


class Timeline:
    """The last `CAPACITY` entries; the oldest leave. `clock`: seconds since 1970."""

    __slots__ = ("_clock", "_entries", "_revision")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str, str], Happened] = OrderedDict()
        self._revision = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, kind: str, severity: Severity, about: object, text: str, count: int = 1) -> None:
        """Something happened, so often. O(1)."""
        at, key = self._clock(), (kind, str(about), text)
        self._revision += 1
        known = self._entries.pop(key, None)
        if known is not None and at - known.at < AGAIN_S:
            self._entries[key] = replace(
                known, revision=self._revision, at=at, count=known.count + count
            )
            return
        self._entries[key] = Happened(
            self._revision, self._revision, at, kind, severity, str(about), text, count
        )
        if len(self._entries) > CAPACITY:
            self._entries.popitem(last=False)

    def since(self, revision: int) -> Iterable[Happened]:
        """Entries that are new or changed since then, oldest first; 0: all. O(entries)."""
        return [each for each in self._entries.values() if each.revision > revision]

"""The lives of one engine, as its server shows them: gone, back, or several behind one URL."""

from msgspec import Struct

from router.discovery.attach.engine_server import ObservedServer

FALLS_S = 60.0
"""Two falls of a counter within this time, without an absence between, are of several engines: a
process that starts again does not answer for longer than a look takes."""

CLOCK_S = 1.0
"""Differences of start times that are no other process: they are read at several moments."""


class Return(Struct, frozen=True):
    """An engine that answers again after `gone_s`. `is_new`: it is another process."""

    gone_s: float
    is_new: bool


class EngineLife:
    """The last observation of an engine's process.

    `is_several`: more than one engine answers at this URL. `has_been_up`: it answered once.
    """

    __slots__ = ("_fell_s", "_gone_since_s", "_started_s", "_tokens", "has_been_up", "is_several")

    def __init__(self) -> None:
        self.has_been_up = self.is_several = False
        self._gone_since_s: float | None = None
        self._fell_s: float | None = None
        self._started_s: float | None = None
        self._tokens: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if it answered before, and does not now."""
        return self._gone_since_s is not None

    def note_absent(self, now_s: float) -> None:
        """Record that it does not answer."""
        if self.has_been_up and self._gone_since_s is None:
            self._gone_since_s = now_s

    def note(self, seen: ObservedServer, now_s: float) -> Return | None:
        """Record that it answers. Returns its return, if it was gone or is another process.

        Without a start time or counters, an engine that was gone counts as a new process.
        """
        is_older, is_later = self._compare_start(seen.started_s)
        has_fallen = _is_less(seen.served_tokens, self._tokens)
        has_changed = is_older or is_later or (has_fallen and seen.started_s is None)
        gone_since_s, was_up = self._gone_since_s, self.has_been_up
        if gone_since_s is None and was_up and has_changed:
            self._note_jump(is_certain=is_older, now_s=now_s)
        is_unknown = seen.started_s is None and not seen.served_tokens
        self.has_been_up, self._gone_since_s = True, None
        self._started_s, self._tokens = seen.started_s, seen.served_tokens
        if gone_since_s is not None:
            return Return(now_s - gone_since_s, has_changed or is_unknown)
        return Return(0.0, is_new=True) if was_up and has_changed else None

    def _compare_start(self, started_s: float | None) -> tuple[bool, bool]:
        """Return whether the process started before the one seen last, and whether after it."""
        if started_s is None or self._started_s is None:
            return False, False
        return started_s < self._started_s - CLOCK_S, started_s > self._started_s + CLOCK_S

    def _note_jump(self, *, is_certain: bool, now_s: float) -> None:
        """Record a change of the process between two looks; one that was older is of another."""
        is_repeated = self._fell_s is not None and now_s - self._fell_s < FALLS_S
        self.is_several = self.is_several or is_certain or is_repeated
        self._fell_s = now_s


def _is_less(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and now < before

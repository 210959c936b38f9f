"""Replay of a recording on a core, with a comparison of all decisions."""

from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from router.core.commands import Command, Decision, Placing, Reconfigure
from router.core.core import RouterCore
from router.errors import KvRouterError
from router.recording.entries import Entry, RecordedResult, choice_of, result_of
from router.recording.format import Cause, End, Hole, Line, RecordingError
from router.scheduler.selector import Choice


class Decided(Struct, frozen=True):
    """A replayed decision. `choice`: its candidates, if the core chose."""

    outcome: RecordedResult
    choice: Choice | None = None


class Compared(Struct, frozen=True):
    """A decision as recorded, and as replayed. `line` is its number in the file."""

    line: int
    at_s: float
    recorded: Entry
    now: Decided

    @property
    def is_equal(self) -> bool:
        """True if the outcomes are equal, to the last bit of every candidate's cost."""
        return self.recorded.outcome == self.now.outcome


class Replay:
    """A replay of a recording on one core, line by line.

    `lines`: the number of replayed lines. `missing`: entries that are not in the recording;
    `hole_line`: the line of the first of them, after which the core's state differs from the
    recorded one; `cause`: why they are missing.
    `keeps_settings`: those of the core stay in force, where the recorded router's were changed.
    `ended`: the reason of the recording's end; None if it has no end, so its last moments are
    missing.
    """

    __slots__ = (
        "_keeps_settings",
        "at_s",
        "cause",
        "core",
        "ended",
        "hole_line",
        "lines",
        "missing",
    )

    def __init__(self, core: RouterCore, *, keeps_settings: bool = False) -> None:
        self.core = core
        self._keeps_settings = keeps_settings
        self.lines = 0
        self.at_s = 0.0
        self.missing = 0
        self.hole_line: int | None = None
        self.cause: Cause | None = None
        self.ended: str | None = None

    def take(self, number: int, line: Line) -> Compared | None:
        """Replay a line; return the comparison if it is a decision.

        Raises RecordingError for a line that no core can have recorded.
        """
        try:
            return self._take(number, line)
        except KvRouterError as error:
            raise RecordingError("damaged", number, str(error)) from error
        finally:
            self.at_s = line.at_s
            self.lines += 1

    def _take(self, number: int, line: Line) -> Compared | None:
        entry = line.entry
        if isinstance(entry, Hole):
            self.missing += entry.missing
            self.hole_line = self.hole_line or number
            self.cause = self.cause or entry.cause
        elif isinstance(entry, End):
            self.ended = entry.reason
        elif isinstance(entry.command, Reconfigure) and self._keeps_settings:
            return None
        elif isinstance(entry.command, Decision):
            return Compared(number, line.at_s, entry, self._decide(entry.command, entry.now_s))
        else:
            with suppress(KvRouterError):  # the recorded core raised it too
                self.core.handle(entry.command, entry.now_s)
        return None

    def _decide(self, command: Command[Any], now_s: float) -> Decided:
        """Replay a decision. Raises InvalidFieldError for a prompt that is invalid."""
        if isinstance(command, Placing):
            command = replace(command, prompt=self.core.hashed(command.request))
        reply: Any
        try:
            reply, _ = self.core.handle(command, now_s)
        except KvRouterError as error:
            reply = error
        return Decided(result_of(self.core, command, reply), choice_of(reply))

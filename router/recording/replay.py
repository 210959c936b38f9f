"""A recording told to a core again, in its own time: does it decide the same?"""

from msgspec import Struct

from router.core import RouterCore
from router.errors import KvRouterError
from router.recording.decisions import Decided, Decision
from router.recording.errors import RecordingError
from router.recording.format import End, Hole, Line


class Compared(Struct, frozen=True):
    """A decision as it was recorded, and as it is made now. `line` is its number in the file."""

    line: int
    at_s: float
    recorded: Decision
    now: Decided

    @property
    def is_equal(self) -> bool:
        """Whether it came out the same, to the last bit of every candidate's cost."""
        return self.recorded.outcome == self.now.outcome


class Replay:
    """One core, told one line after the other.

    `lines`: how many it was told. `missing`: entries that were never written; the first of them are
    missing at `hole_line`, and from there on the core's state is not the recorded one's. `ended`:
    why the recording was ended; None: it was not, and its last moments are missing.
    """

    __slots__ = ("_core", "at_s", "ended", "hole_line", "lines", "missing")

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self.lines = 0
        self.at_s = 0.0
        self.missing = 0
        self.hole_line: int | None = None
        self.ended: str | None = None

    def take(self, number: int, line: Line) -> Compared | None:
        """Tell the core what a line says; a decision is compared.

        Raises RecordingError for what nobody can have told.
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
        if isinstance(entry, Decision):
            return Compared(number, line.at_s, entry, entry.decide(self._core))
        if isinstance(entry, Hole):
            self.missing += entry.missing
            self.hole_line = self.hole_line or number
        elif isinstance(entry, End):
            self.ended = entry.reason
        else:
            entry.tell(self._core)
        return None

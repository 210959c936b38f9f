"""Replays that are over, in a file, a line each: a run that was cut short goes on where it was.

A replay is the same each time, to the last bit, as long as the code is: a journal is good for one
version of it. Delete the lines of what has changed, or the file.
"""

from pathlib import Path

from msgspec import Struct, json
from scheduling_runs import Case

from router.simulator.summary import Summary


class Replay(Struct, frozen=True):
    """A replay, and what came of it."""

    case: Case
    summary: Summary


def read_journal(path: Path) -> dict[Case, Summary]:
    """All that is in it; nothing if there is none."""
    if not path.exists():
        return {}
    replays = json.Decoder(Replay)
    lines = [replays.decode(line) for line in path.read_bytes().splitlines()]
    return {replay.case: replay.summary for replay in lines}


def append(path: Path, case: Case, summary: Summary) -> None:
    """Write it down at once."""
    with path.open("ab") as lines:
        lines.write(json.encode(Replay(case, summary)) + b"\n")

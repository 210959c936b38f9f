"""`kv-router replay`: applies a recording to another core, and compares its decisions.

Exit status: 0; 1 if a decision differs without changed settings, or a line is damaged; 2 for a
wrong command line, a file that is not a recording of this version, or one without a decision. A
truncated recording is replayed up to its last complete line; one in several files from the first
that is still there up to the named one.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from msgspec import json

from router.config.router import RouterConfig
from router.errors import ConfigError
from router.recording.format import Line, RecordingError, Setting
from router.recording.replay import Replay
from router.runtime.process.loading import checked
from router.tools.recordings import report
from router.tools.recordings.arguments import replay_parser
from router.tools.recordings.cores import replayed_core
from router.tools.recordings.parts import OpenRecording
from router.tools.recordings.tally import Tally


def replay(arguments: Sequence[str]) -> int:
    """Replay, print the result, return the exit status. Raises ConfigError."""
    given = vars(replay_parser().parse_args(arguments))
    path, speed, limit = given.pop("file"), given.pop("speed"), given.pop("limit")
    as_json = given.pop("json")
    settings = checked(RouterConfig, given, "flag")
    try:
        with OpenRecording(Path(path)) as recording:
            run = _Run(recording, settings, speed, limit, as_json=as_json)
            if not as_json:
                _print(report.opening(path, recording.header, settings, version("kv-router")))
            status = run.run()
            if run.is_empty:
                sys.stderr.write(f"kv-router replay: {path}: {report.EMPTY}\n")
            return 2 if run.is_empty else status
    except OSError as error:
        raise ConfigError("FILE", f"{path}: {error.strerror}", "a readable recording") from error
    except RecordingError as error:
        sys.stderr.write(f"kv-router replay: {path}: {error}\n")
        return 2


class _Run:
    """One replay, from the first line after the header. `is_empty`: all of it has no decision."""

    def __init__(
        self,
        recording: OpenRecording,
        settings: dict[str, Setting],
        speed: float,
        limit: int,
        *,
        as_json: bool,
    ) -> None:
        core = replayed_core(recording.header, settings)
        self._replay = Replay(core, keeps_settings=bool(settings))
        self._tally = Tally()
        self._lines = recording.lines()
        self.is_empty = False
        self._speed = speed
        self._limit = limit or None
        self._is_rescoring = bool(settings)
        self._as_json = as_json
        self._start_s = time.monotonic()

    def run(self) -> int:
        """Replay, print the result, return the exit status."""
        problem, is_at_end = None, False
        try:
            with suppress(KeyboardInterrupt):  # the part replayed so far is reported nevertheless
                is_at_end = self._run_to_end()
        except RecordingError as error:
            problem = error
        elapsed_s, tally = time.monotonic() - self._start_s, self._tally
        self.is_empty = is_at_end and not tally.decisions + tally.unproven
        if self._as_json:
            _print(json.encode(report.as_value(self._replay, tally, problem)).decode())
        else:
            self._tell(problem, elapsed_s, is_at_end=is_at_end)
        is_damaged = problem is not None and problem.problem != "cut off"
        differs = tally.equal < tally.decisions and not self._is_rescoring
        return int(is_damaged or differs)

    def _tell(self, problem: RecordingError | None, elapsed_s: float, *, is_at_end: bool) -> None:
        replay, tally = self._replay, self._tally
        for text in (
            *report.closing(replay, tally, problem, elapsed_s, is_at_end=is_at_end),
            *(report.scores(tally) if self._is_rescoring else report.equality(tally)),
        ):
            _print(text)

    def _run_to_end(self) -> bool:
        """Replay all lines; return False if the limit came before the end."""
        for number, line in islice(_paced(self._lines, self._speed), self._limit):
            compared = self._replay.take(number, line)
            if compared is None:
                continue
            self._tally.add(compared, is_behind_hole=self._replay.hole_line is not None)
            if self._speed and not self._as_json:
                _print(report.decision_line(compared))
        return self._replay.lines != self._limit


def _paced(lines: Iterator[tuple[int, Line]], speed: float) -> Iterator[tuple[int, Line]]:
    """Yield each line when it is due; at speed 0 without delay."""
    start_s = time.monotonic()
    for number, line in lines:
        if speed:
            time.sleep(max(0.0, start_s + line.at_s / speed - time.monotonic()))
        yield number, line


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

"""The recording of a running router: begun and ended at any time, at most one at a time.

    begin ─▶ commands of the core ─▶ Recorder ─▶ FILE, FILE.1, …      end ─▶ the core alone again

A recording that begins with an empty core is replayed to the last bit. One that begins later lacks
the state before: it has the fleet at its start, and all traffic, which `kv-router simulate` takes.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from router.config.router import DECISION_SETTINGS, RouterConfig
from router.core.core import RouterCore
from router.errors import ConfigError, KvRouterError
from router.observability.recorder import Recorder, RecordingLimits
from router.recording.format import Header, Setting
from router.recording.recorded_core import RecordedCore
from router.runtime.process.metrics import Rows, counter, gauge
from router.runtime.process.settings import settings_of

PARTS = 8
"""The number of files into which the limit of a recording is divided."""

DEFAULT_NAME = "recording.jsonl"


class RecordingUnavailableError(KvRouterError):
    """A recording that cannot begin, because of the settings or the disk."""

    code = "recording_unavailable"
    http_status = 409


class RecordingRequest(Struct, forbid_unknown_fields=True):
    """`recording`: true begins a recording, false ends it; neither changes what is so already."""

    recording: bool


class RecordingView(Struct, frozen=True):
    """The present recording, or the last one.

    `recording`: commands are recorded at present. `file`: the newest of its files; null if there is
    no setting for one. `max_bytes`: limit of all its files. `is_midway`: it began in a running
    router. `records`: commands and decisions recorded. `decisions`: those of them that are
    decisions. `missing`: commands and decisions dropped. `written_bytes`: the size of all its
    files, deleted ones included. `waiting_bytes`: what is not yet written. `rotations`: the number
    of its full files. `problem`: why the disk takes nothing, or null.
    """

    recording: bool
    file: str | None
    max_bytes: int
    is_midway: bool = False
    records: int = 0
    decisions: int = 0
    missing: int = 0
    written_bytes: int = 0
    waiting_bytes: int = 0
    rotations: int = 0
    problem: str | None = None


_COUNTED = ("records", "decisions", "missing", "written_bytes", "rotations")


class Recording:
    """The recording of one core. `seed`: that of the core's random generator."""

    def __init__(self, config: RouterConfig, core: RouterCore, seed: int) -> None:
        self._config, self._core, self._seed = config, core, seed
        settings, data_dir = config.observability, config.service.data_dir
        default = Path(data_dir) / DEFAULT_NAME if data_dir else None
        self._path = Path(settings.record_to) if settings.record_to else default
        most_bytes = settings.record_max_bytes
        self._limits = RecordingLimits(max_bytes=most_bytes, part_bytes=most_bytes // PARTS)
        self._recorder: Recorder | None = None
        self._recorded: RecordedCore | None = None
        self._is_midway = False
        self._totals = dict.fromkeys(_COUNTED, 0)

    def reconfigure(self, config: RouterConfig) -> None:
        """Note the settings in force, for the header of the next file."""
        self._config = config

    def begin(
        self,
        path: Path | None = None,
        limits: RecordingLimits | None = None,
        on_end: Callable[[], None] = lambda: None,
        *,
        is_midway: bool = False,
    ) -> None:
        """Record every command from now on; without effect while that is so already.

        `path`, `limits`: in place of those of the settings. Raises RecordingUnavailableError,
        ConfigError.
        """
        if self.is_recording:
            return
        if self._config.index.event_threads != 1:
            problem = f"event_threads {self._config.index.event_threads}: the timing of threads"
            raise RecordingUnavailableError(f"{problem} cannot be replayed (allowed: 1)")
        path = path or self._path
        if path is None:
            allowed = "record_to or data_dir, at start"
            raise RecordingUnavailableError(f"no file to record to (allowed: {allowed})")
        header = replace(self._header(), is_midway=is_midway)
        if is_midway:
            header = self._renewed(header)
        limits = limits or self._limits
        try:
            recorder = Recorder(path, header, limits, on_end, renewed=self._renewed)
        except OSError as error:
            setting = "record_to" if path == self._path else "output"
            allowed = "a new file in a writable folder"
            raise ConfigError(setting, f"{path}: {error.strerror}", allowed) from error
        self._totals = {name: self.total(name) for name in _COUNTED}
        self._is_midway, self._recorder = is_midway, recorder
        self._recorded = RecordedCore(self._core, recorder.take)

    def end(self, reason: str) -> Recorder | None:
        """End the recording with a reason, and return it. Returns None if there is none."""
        if self._recorded is not None:
            self._recorded.release()
            self._recorded = None
        if self._recorder is not None:
            self._recorder.end(reason)
        return self._recorder

    async def finish(self) -> None:
        """End the recording, and wait until it is on the disk."""
        recorder = self.end("stopped")
        if recorder is not None:
            await asyncio.to_thread(recorder.close)

    @property
    def is_recording(self) -> bool:
        """True if commands are recorded at present."""
        return self._recorder is not None and not self._recorder.is_over

    @property
    def is_failing(self) -> bool:
        """True if the disk takes nothing at present, or did at the end."""
        return self._recorder is not None and self._recorder.failure is not None

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes yet to be written."""
        return 0 if self._recorder is None else self._recorder.waiting_bytes

    def total(self, name: str) -> int:
        """Return a number of a recorder, summed over all recordings of this process."""
        now = 0 if self._recorder is None else int(getattr(self._recorder, name))
        return self._totals[name] + now

    def view(self) -> RecordingView:
        """Return the present recording, or the last one."""
        recorder, most_bytes = self._recorder, self._limits.max_bytes
        if recorder is None:
            return RecordingView(False, None if self._path is None else str(self._path), most_bytes)
        counted = {name: int(getattr(recorder, name)) for name in _COUNTED}
        return RecordingView(
            recording=self.is_recording,
            file=str(recorder.path),
            max_bytes=recorder.limits.max_bytes,
            is_midway=self._is_midway,
            waiting_bytes=recorder.waiting_bytes,
            problem=None if recorder.failure is None else str(recorder.failure),
            **counted,
        )

    def _header(self) -> Header:
        return Header(
            product_version=version("kv-router"),
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=decision_settings(self._config),
            seed=self._seed,
            multiplier=self._config.index_settings.multiplier,
        )

    def _renewed(self, header: Header) -> Header:
        workers = tuple(worker.announcement for worker in self._core.fleet)
        settings = decision_settings(self._config)
        return replace(header, settings=settings, now_s=time.monotonic(), workers=workers)


def decision_settings(config: RouterConfig) -> dict[str, Setting]:
    """Return the settings that a header must contain."""
    return {s.name: s.value for s in settings_of(config) if s.name in DECISION_SETTINGS}


def _total(name: str) -> Callable[[Recording], int]:
    return lambda recording: recording.total(name)


RECORDING_METRICS: Rows = {
    "recording": gauge("1: commands and decisions are recorded", "is_recording"),
    "recorded": counter("Commands and decisions recorded", _total("records")),
    "recorded_bytes": counter("Bytes written to recordings", _total("written_bytes")),
    "recording_missing": counter("Records dropped: the queue was full", _total("missing")),
    "recording_rotations": counter("Full parts of recordings, renamed", _total("rotations")),
    "recording_waiting_bytes": gauge("Bytes not yet written", "waiting_bytes"),
    "recording_failed": gauge("1: the disk takes nothing of the recording", "is_failing"),
}

"""`kv-router record`: a router that records its commands and decisions."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from router.errors import ConfigError
from router.observability.recorder import RecordingLimits
from router.observability.recording import RecordingView
from router.runtime.http_server.server import run_until_signal
from router.runtime.process.logs import log_to_stderr
from router.service.router import RouterService
from router.tools.recordings.arguments import RecordConfig, load_record_config

log = logging.getLogger(__name__)

UNASKED_S = 30.0
"""The time without a decision after which a recording router says that no caller asks it."""

UNASKED = (
    "no caller asks this router, so there are no decisions; to record one that callers ask, use "
    "its POST /recording or serve --record-to FILE"
)


def record(arguments: Sequence[str]) -> int:
    """Serve and record until a signal or a limit; return 1 if the file is incomplete."""
    config = load_record_config(arguments, os.environ)
    logs = config.router.logs
    log_to_stderr(logs.log_level, logs.log_format)
    recording = RecordedRouter(config)
    run_until_signal(recording.run)
    sys.stderr.write(f"kv-router record: {recording.outcome}\n")
    return int(recording.is_broken)


class RecordedRouter:
    """One router and its recording; when either ends, so does the other."""

    def __init__(self, config: RecordConfig) -> None:
        self._config = config
        self._service: RouterService | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or a limit is reached. Raises ConfigError."""
        loop, config = asyncio.get_running_loop(), self._config
        service = self._service = RouterService(config.router)
        limits = RecordingLimits(config.max_records, config.max_bytes)
        path = Path(config.output)
        service.recording.begin(path, limits, stop.set)
        loop.call_later(UNASKED_S, self._note_unasked)
        if config.seconds:
            loop.call_later(config.seconds, service.recording.end, "seconds")
        try:
            await service.run(stop)
        except ConfigError:
            await asyncio.to_thread(path.unlink)
            raise

    @property
    def is_broken(self) -> bool:
        """True if the file could not be written to its end."""
        return self._service is not None and self._service.recording.is_failing

    @property
    def outcome(self) -> str:
        """The outcome of the recording, as a sentence."""
        if self._service is None:
            return "nothing was recorded"
        view = self._service.recording.view()
        if view.problem is not None:
            return f"{view.file} could not be written to its end: {view.problem}"
        unasked = "" if view.decisions else f"; {UNASKED}"
        return f"{_counted(view)}{unasked}"

    def _note_unasked(self) -> None:
        if self._service is not None and not self._service.recording.view().decisions:
            log.warning("%s", UNASKED)


def _counted(view: RecordingView) -> str:
    missing = f", {view.missing} are missing" if view.missing else ""
    return f"{view.file}: {view.records:,} records, {view.written_bytes:,} bytes{missing}"

"""`kv-router record`: a router that records its commands and decisions."""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from secrets import randbits

from router.config.router import RouterConfig
from router.errors import ConfigError
from router.observability.recorder import RECORDER_METRICS, Recorder, RecordingLimits
from router.recording.format import Header
from router.runtime.http_server.server import run_until_signal
from router.runtime.process.logs import log_to_stderr
from router.runtime.process.metrics import expose
from router.service.router import RouterService
from router.tools.recordings.arguments import RecordConfig, load_record_config
from router.tools.recordings.cores import decision_settings, recorded_core


def record(arguments: Sequence[str]) -> int:
    """Serve and record until a signal or a limit; return 1 if the file is incomplete."""
    config = load_record_config(arguments, os.environ)
    logs = config.router.logs
    log_to_stderr(logs.log_level, logs.log_format)
    recording = Recording(config)
    run_until_signal(recording.run)
    sys.stderr.write(f"kv-router record: {recording.outcome}\n")
    return int(recording.is_broken)


class Recording:
    """One router and its recording; when either ends, so does the other."""

    def __init__(self, config: RecordConfig) -> None:
        self._config = config
        self._recorder: Recorder | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or a limit is reached. Raises ConfigError."""
        loop, config = asyncio.get_running_loop(), self._config
        header = _header(config.router)
        limits = RecordingLimits(config.max_records, config.max_bytes)
        path = Path(config.output)

        def end() -> None:
            loop.call_soon_threadsafe(stop.set)

        recorder = self._recorder = Recorder(path, header, limits, end)
        service = RouterService(config.router, recorded_core(header, recorder.take))
        expose(service.host.metrics.registry, "kv_router_", RECORDER_METRICS, recorder)
        if config.seconds:
            loop.call_later(config.seconds, recorder.end, "seconds")
        try:
            await service.run(stop)
        except ConfigError:
            await asyncio.to_thread(path.unlink)
            raise
        except BaseException:
            recorder.end("the router failed")
            raise
        finally:
            await asyncio.to_thread(recorder.close)

    @property
    def is_broken(self) -> bool:
        """True if the file could not be written to its end."""
        return self._recorder is not None and self._recorder.failure is not None

    @property
    def outcome(self) -> str:
        """The outcome of the recording, as a sentence."""
        recorder, path = self._recorder, self._config.output
        if recorder is None:
            return "nothing was recorded"
        if recorder.failure is not None:
            return f"{path} could not be written to its end: {recorder.failure}"
        missing = f", {recorder.missing} are missing" if recorder.missing else ""
        return f"{path}: {recorder.records:,} records, {recorder.written_bytes:,} bytes{missing}"


def _header(config: RouterConfig) -> Header:
    return Header(
        product_version=version("kv-router"),
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=decision_settings(config),
        seed=randbits(53),
        multiplier=config.index_settings.multiplier,
    )

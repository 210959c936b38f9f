"""`kv-router record`: a router like any other that writes down all it is told and asked."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from secrets import randbits
from typing import Annotated

from msgspec import Meta

from router.config import RouterConfig
from router.errors import ConfigError
from router.loading import load_router
from router.process.logs import log_to_stderr
from router.process.serving import run_until_signal
from router.recorder import Recorder, RecorderCollector, RecordingLimits
from router.recording.format import Header
from router.service import RouterService
from router.tools.recordings.cores import decision_settings, recorded_core


class RecordConfig(RouterConfig, frozen=True, kw_only=True):
    """What a router that records can be told: all that others can, and how much to record."""

    output: Annotated[
        str, Meta(description="file to write; it must not exist yet, and will contain prompts")
    ] = ""
    max_records: Annotated[
        int, Meta(ge=0, description="stop after this many records; 0: no limit")
    ] = 0
    max_bytes: Annotated[
        int, Meta(ge=4096, description="stop before the file gets larger than this")
    ] = 1 << 30
    seconds: Annotated[float, Meta(ge=0, description="stop after this time; 0: no limit")] = 0.0


def load_record_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RecordConfig:
    """The configuration of a router that records. Raises ConfigError."""
    loaded = load_router(RecordConfig, arguments, environment)
    config = loaded.config
    if not config.output:
        raise ConfigError("output", "missing", "a file to write, as --output FILE")
    if config.event_threads != 1:
        problem = f"{config.event_threads}: the timing of threads cannot be replayed"
        raise ConfigError("event_threads", problem, "1")
    return loaded.shown()


def record(arguments: Sequence[str]) -> int:
    """Serve and record until a signal or a limit; 1 if the file could not be written."""
    config = load_record_config(arguments, os.environ)
    log_to_stderr(config.log_level, config.log_format)
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
        header = _header(config)
        limits = RecordingLimits(config.max_records, config.max_bytes)
        path = Path(config.output)

        def end() -> None:
            loop.call_soon_threadsafe(stop.set)

        recorder = self._recorder = Recorder(path, header, limits, end)
        service = RouterService(config, recorded_core(header, recorder.take))
        service.metrics.registry.register(RecorderCollector(recorder))
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
        """Whether the file could not be written to its end."""
        return self._recorder is not None and self._recorder.failure is not None

    @property
    def outcome(self) -> str:
        """What was recorded, in words."""
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
        multiplier=config.index.multiplier,
    )

"""`kv-router record`: a router that records its commands and decisions."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from secrets import randbits
from typing import Annotated, ClassVar

from msgspec import Struct, structs

from router.config.load import check_router, completed, load_extended, with_warnings
from router.config.router import RouterConfig
from router.errors import ConfigError
from router.observability.recorder import RECORDER_METRICS, Recorder, RecordingLimits
from router.recording.format import Header
from router.runtime.http_server.server import run_until_signal
from router.runtime.process.logs import log_to_stderr
from router.runtime.process.metrics import expose
from router.runtime.process.settings import COMMON, about
from router.service.router import RouterService
from router.tools.recordings.cores import decision_settings, recorded_core


class RecordConfig(Struct, frozen=True, kw_only=True):
    """Settings of a recording router: those of any router, and the limits of the recording."""

    GROUP: ClassVar[str] = "recording"

    router: RouterConfig = RouterConfig()
    output: Annotated[
        str,
        about(
            "file to write; it must not exist yet, and will contain prompts", COMMON, unit="FILE"
        ),
    ] = ""
    max_records: Annotated[
        int, about("stop after this many records; 0: no limit", ge=0, unit="RECORDS")
    ] = 0
    max_bytes: Annotated[
        int, about("stop before the file gets larger than this", COMMON, ge=4096)
    ] = 1 << 30
    seconds: Annotated[
        float, about("stop after this time; 0: no limit", COMMON, ge=0, unit="SECONDS")
    ] = 0.0


def load_record_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RecordConfig:
    """Return the settings of a recording router. Raises ConfigError."""
    loaded = load_extended(RecordConfig, arguments, environment)
    config, router = loaded.config, loaded.config.router
    check_router(router, loaded.sources)
    if not config.output:
        raise ConfigError("output", "missing", "a file to write, as --output FILE")
    if router.index.event_threads != 1:
        problem = f"{router.index.event_threads}: the timing of threads cannot be replayed"
        raise ConfigError("event_threads", problem, "1")
    config = structs.replace(config, router=completed(router))
    return with_warnings(structs.replace(loaded, config=config), config.router).shown()


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

"""Where requests come from: a file of Mooncake's, a recording, or a workload that is made up."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import BinaryIO

from msgspec import Struct

from router.errors import ConfigError
from router.recording.format import FORMAT, LINE_LIMIT_BYTES, Setting, decode_header, decode_lines
from router.simulator.engine_model import EngineModel
from router.simulator.mooncake import read_mooncake
from router.simulator.recorded import read_recording
from router.simulator.traces import Trace
from router.simulator.workloads import WORKLOADS
from router.tools.simulation.specs import parsed_spec


class Source(Struct, frozen=True):
    """A trace; of a recording also its fleet, and the settings of the router that served it."""

    trace: Trace
    models: Sequence[EngineModel] = ()
    settings: Mapping[str, Setting] | None = None


def load_source(text: str, block_size: int, seed: int) -> Source:
    """What TRACE stands for; `seed` is that of a made-up workload.

    Raises ConfigError, TraceError, RecordingError.
    """
    name = text.partition(":")[0]
    if name in WORKLOADS and not Path(text).exists():
        workload = parsed_spec("trace", text).converted("trace", WORKLOADS[name])
        return Source(workload.trace(block_size, Random(seed)))
    try:
        with Path(text).open("rb") as file:
            return _read(Path(text).name, file, block_size)
    except OSError as error:
        allowed = f"a readable file, or a workload: {', '.join(WORKLOADS)}"
        raise ConfigError("trace", f"{text}: {error.strerror}", allowed) from error


def _read(name: str, file: BinaryIO, block_size: int) -> Source:
    first = file.readline(LINE_LIMIT_BYTES)
    if FORMAT.encode() not in first[:64]:
        return Source(read_mooncake(name, chain([first] if first else [], file), block_size))
    header = decode_header(first)
    lines = iter(lambda: file.readline(LINE_LIMIT_BYTES), b"")
    recorded = read_recording(name, decode_lines(lines))
    return Source(recorded.trace, recorded.models, header.settings)

"""Sources of requests, and the engines of a simulated fleet."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random

from msgspec import Struct, json

from router.errors import ConfigError
from router.protocol.values import UNREADABLE
from router.recording.format import FORMAT, LINE_LIMIT_BYTES, Setting
from router.simulator.engine_model import EngineModel, llama_8b, llama_70b
from router.simulator.mooncake import read_mooncake
from router.simulator.recorded import read_recording
from router.simulator.scenario import Failure, Incident, SlowDown
from router.simulator.traces import Trace
from router.simulator.workloads.registry import WORKLOADS
from router.tools.recordings.parts import OpenRecording
from router.tools.simulate.specs import parsed_spec, parsed_specs

PRESETS = {"70b": llama_70b, "8b": llama_8b}


def parsed_models(text: str, workers: int) -> tuple[EngineModel, ...]:
    """Return a model for each worker, from a list that repeats. Raises ConfigError."""
    models = [_model(word) for word in text.split()]
    return tuple(models[worker % len(models)] for worker in range(workers))


def parsed_incidents(text: str, workers: int) -> tuple[Incident, ...]:
    """Return the incidents of a simulation. Raises ConfigError."""
    if not text.strip():
        return ()
    kinds: dict[str, type[Incident]] = {"slow": SlowDown, "fail": Failure}
    incidents: list[Incident] = []
    for spec in parsed_specs("incidents", text):
        if spec.name not in kinds:
            raise ConfigError("incidents", repr(spec.text), "slow:… or fail:…")
        incident = spec.converted("incidents", kinds[spec.name])
        if incident.worker >= workers:
            raise ConfigError("incidents", repr(spec.text), f"worker 0 to {workers - 1}")
        incidents.append(incident)
    return tuple(incidents)


def _model(word: str) -> EngineModel:
    preset = PRESETS.get(word)
    if preset is not None:
        return preset()
    try:
        return json.decode(Path(word).read_bytes(), type=EngineModel)
    except OSError as error:
        allowed = f"{', '.join(PRESETS)}, or a readable file"
        raise ConfigError("models", f"{word}: {error.strerror}", allowed) from error
    except UNREADABLE as error:
        allowed = f"a JSON object of {', '.join(EngineModel.__struct_fields__)}"
        raise ConfigError("models", f"{word}: {error}", allowed) from error


class Source(Struct, frozen=True):
    """A trace; of a recording also its fleet, and the settings of its router."""

    trace: Trace
    models: Sequence[EngineModel] = ()
    settings: Mapping[str, Setting] | None = None


def load_source(text: str, block_size: int, seed: int) -> Source:
    """Return the source for the argument TRACE; `seed` is for synthetic workloads.

    Raises ConfigError, TraceError, RecordingError.
    """
    name = text.partition(":")[0]
    if name in WORKLOADS and not Path(text).exists():
        workload = parsed_spec("trace", text).converted("trace", WORKLOADS[name])
        return Source(workload.trace(block_size, Random(seed)))
    try:
        with Path(text).open("rb") as file:
            first = file.readline(LINE_LIMIT_BYTES)
            if FORMAT.encode() not in first[:64]:
                lines = chain([first] if first else [], file)
                return Source(read_mooncake(Path(text).name, lines, block_size))
        with OpenRecording(Path(text)) as recording:
            recorded = read_recording(Path(text).name, recording.lines())
            return Source(recorded.trace, recorded.models, recording.header.settings)
    except OSError as error:
        allowed = f"a readable file, or a workload: {', '.join(WORKLOADS)}"
        raise ConfigError("trace", f"{text}: {error.strerror}", allowed) from error

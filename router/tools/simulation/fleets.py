"""The engines of a simulated fleet: presets, constants from a file, or as measured."""

from pathlib import Path

from msgspec import DecodeError, ValidationError, json

from router.errors import ConfigError
from router.simulator.engine_model import EngineModel, llama_8b, llama_70b
from router.simulator.scenario import Failure, Incident, SlowDown
from router.tools.simulation.specs import parsed_specs

PRESETS = {"70b": llama_70b, "8b": llama_8b}


def parsed_models(text: str, workers: int) -> tuple[EngineModel, ...]:
    """A model for each worker, from a list that begins again where it ends. Raises ConfigError."""
    models = [_model(word) for word in text.split()]
    return tuple(models[worker % len(models)] for worker in range(workers))


def parsed_incidents(text: str, workers: int) -> tuple[Incident, ...]:
    """What is to befall the fleet. Raises ConfigError."""
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
    except (DecodeError, ValidationError, UnicodeDecodeError) as error:
        allowed = f"a JSON object of {', '.join(EngineModel.__struct_fields__)}"
        raise ConfigError("models", f"{word}: {error}", allowed) from error

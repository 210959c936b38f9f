"""The runs of `kv-router simulate`: its configuration, read and checked."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from router.errors import ConfigError
from router.simulator.engine_model import StepModel
from router.simulator.physics import PHYSICS, Physics
from router.simulator.scenario import Incident, Scenario
from router.simulator.traces import Trace, spread_arrivals
from router.tools.simulate.config import SimulateConfig
from router.tools.simulate.sources import Source, load_source, parsed_incidents, parsed_models
from router.tools.simulate.specs import (
    NamedPolicy,
    default_settings,
    named_policy,
    parsed_numbers,
    parsed_specs,
)

_Speed = Annotated[float, Meta(gt=0, le=1e6)]
_Seed = Annotated[int, Meta(ge=0, le=1 << 53)]


class Plan(Struct, frozen=True, kw_only=True):
    """Every policy with every seed at every speed; `facts` describe it in words."""

    trace: Trace
    policies: tuple[NamedPolicy, ...]
    speeds: tuple[float, ...]
    seeds: tuple[int, ...]
    base: Scenario
    facts: Mapping[str, str]

    def scenario(self, arrival_speed: float, seed: int) -> Scenario:
        """Return the scenario of one run."""
        return replace(self.base, arrival_speed=arrival_speed, seed=seed)


def planned(config: SimulateConfig) -> Plan:
    """Return the plan. Raises ConfigError, TraceError, RecordingError."""
    seeds = parsed_numbers("seeds", config.seeds, _Seed)
    source = load_source(config.trace, config.block_size, seeds[0])
    trace = source.trace
    if config.spread_arrivals:
        trace = spread_arrivals(trace)
    if config.limit:
        trace = replace(trace, requests=trace.requests[: config.limit])
    settings = source.settings or default_settings()
    specs = parsed_specs("policies", config.policies)
    physics = _physics(config.physics)
    scenario = _scenario(config, physics, _models(config, source, physics))
    models = config.models or ("as recorded" if source.models else physics.engine)
    return Plan(
        trace=trace,
        policies=tuple(named_policy(spec, settings) for spec in specs),
        speeds=tuple(parsed_numbers("speeds", config.speeds, _Speed)),
        seeds=tuple(seeds),
        base=scenario,
        facts=_facts(config, trace, scenario, models),
    )


def _physics(name: str) -> Physics:
    if name not in PHYSICS:
        raise ConfigError("physics", repr(name), ", ".join(PHYSICS))
    return PHYSICS[name]


def _models(config: SimulateConfig, source: Source, physics: Physics) -> tuple[StepModel, ...]:
    workers = config.workers or len(source.models) or physics.workers
    if config.models:
        return parsed_models(config.models, workers)
    models: Sequence[StepModel] = source.models or (physics.model,)
    return tuple(models[worker % len(models)] for worker in range(workers))


def _scenario(config: SimulateConfig, physics: Physics, models: tuple[StepModel, ...]) -> Scenario:
    return Scenario(
        models=models,
        event_lag_s=config.event_lag_s,
        report_lag_s=config.report_lag_s,
        report_interval_s=config.report_interval_s,
        routers=config.routers,
        sync_lag_s=config.sync_lag_s,
        tracks_output=config.tracks_output,
        incidents=(
            *_incidents(config.physics, physics, len(models)),
            *parsed_incidents(config.incidents, len(models)),
        ),
        layers=physics.layers,
        loads=physics.loads,
        disturbances=physics.disturbances,
        background=physics.background,
    )


def _incidents(name: str, physics: Physics, workers: int) -> tuple[Incident, ...]:
    """Return the incidents of a named scenario. Raises ConfigError without their workers."""
    needed = max((1 + incident.worker for incident in physics.incidents), default=1)
    if workers < needed:
        raise ConfigError("workers", f"{workers} with physics {name!r}", f"{needed} or more")
    return physics.incidents


def _facts(config: SimulateConfig, trace: Trace, scenario: Scenario, models: str) -> dict[str, str]:
    requests = trace.requests
    prompts = sum(request.isl_tokens for request in requests) / len(requests)
    outputs = sum(request.osl_tokens for request in requests) / len(requests)
    facts = {
        "trace": f"{trace.name}: {_extent(trace)}" + ", arrivals spread" * config.spread_arrivals,
        "on average": f"{prompts:,.0f} prompt tokens, {outputs:,.0f} output tokens",
        "workers": f"{len(scenario.models)} of {models}, blocks of {trace.block_size} tokens",
        "events": f"{scenario.event_lag_s:g} s late",
        "load reports": f"every {scenario.report_interval_s:g} s, {scenario.report_lag_s:g} s late",
        "routers": f"{scenario.routers}",
        "physics": "" if config.physics == "plain" else PHYSICS[config.physics].meaning,
        "incidents": config.incidents,
        "seeds": config.seeds,
        "kv-router": version("kv-router"),
    }
    return {name: text for name, text in facts.items() if text}


def _extent(trace: Trace) -> str:
    """Return the number of requests, and the time in which they or their sessions begin."""
    begin_s = trace.requests[-1].arrival_s
    sessions = {request.session for request in trace.requests} - {None}
    if not sessions:
        return f"{len(trace.requests):,} requests in {begin_s:,.0f} s"
    begin = f"{len(sessions):,} sessions that begin within {begin_s:,.0f} s"
    return f"{len(trace.requests):,} requests of {begin}"

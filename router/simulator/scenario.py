"""The fleet that a trace is replayed on, its incidents, and what a router learns of it."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from router.simulator.block_cache import LayerGroups
from router.simulator.disturbances import CALM, Disturbances
from router.simulator.engine_model import StepModel

_Seconds = Annotated[float, Meta(ge=0)]


class SlowDown(Struct, frozen=True, forbid_unknown_fields=True):
    """A slow-down of a worker: from `at_s` on, each step takes `slowness` times as long."""

    at_s: _Seconds
    worker: Annotated[int, Meta(ge=0)]
    slowness: Annotated[float, Meta(gt=0)]


class Failure(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure: a worker loses all requests and blocks, and restarts empty after `down_s`."""

    at_s: _Seconds
    worker: Annotated[int, Meta(ge=0)]
    down_s: Annotated[float, Meta(gt=0)]


Incident: TypeAlias = SlowDown | Failure


class LoadSources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reports of the load of engines.

    `source`: an agent's reports, an engine's metrics, which are vLLM's and polled at the report
    interval, or nothing. `lost`: chance of a report to be lost. `busy_factors`: factors by which
    agents report wrong busy times, that of worker i at i modulo their number. `shows_chunk`: agents
    report the tokens of a step.
    """

    source: Literal["agent", "polled", "none"] = "agent"
    lost: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    busy_factors: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)] = (1.0,)
    shows_chunk: bool = True


class Background(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that each worker receives from elsewhere, unknown to routers.

    Poisson arrivals of prompts that share nothing; lengths are exponential, with these means.
    """

    requests_per_s: Annotated[float, Meta(gt=0)]
    isl_tokens: Annotated[int, Meta(ge=1)] = 4_000
    osl_tokens: Annotated[int, Meta(ge=1)] = 200


class Scenario(Struct, frozen=True, kw_only=True):
    """The settings of a simulation.

    `models`: the model of each worker, by its id, from 0. `layers`: those that are not full
    attention, of hybrid models; `hides_classes`: routers learn of full attention only.
    `arrival_speed`: 2 halves the gaps between requests.

    Lags are those of the bus: from an engine to a router (events, reports), and from a router to
    its peers. `tracks_output`: clients report each output block to the router. `reports_late`:
    clients report first tokens together with those of others, from time to time.
    """

    models: tuple[StepModel, ...]
    layers: tuple[LayerGroups, ...] = ()
    hides_classes: bool = False
    arrival_speed: Annotated[float, Meta(gt=0)] = 1.0
    event_lag_s: _Seconds = 0.05
    report_lag_s: _Seconds = 0.05
    report_interval_s: Annotated[float, Meta(gt=0)] = 1.0
    routers: Annotated[int, Meta(ge=1)] = 1
    sync_lag_s: _Seconds = 0.02
    tracks_output: bool = False
    loads: LoadSources = LoadSources()
    reports_late: bool = False
    disturbances: Disturbances = CALM
    background: Background | None = None
    incidents: tuple[Incident, ...] = ()
    seed: int = 0

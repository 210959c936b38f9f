"""The fleet that a trace is replayed on, and its incidents."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

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


class Scenario(Struct, frozen=True, kw_only=True):
    """The settings of a simulation.

    `models`: the model of each worker, by its id, from 0. `arrival_speed`: 2 halves the gaps
    between requests.

    Lags are those of the bus: from an engine to a router (events, reports), and from a router to
    its peers. `tracks_output`: clients report each output block to the router. `polled`: engines
    have no agents; their metrics, which are vLLM's, are polled at the report interval.
    `reports_late`: clients report first tokens together with those of others, from time to time.
    """

    models: tuple[StepModel, ...]
    arrival_speed: Annotated[float, Meta(gt=0)] = 1.0
    event_lag_s: _Seconds = 0.05
    report_lag_s: _Seconds = 0.05
    report_interval_s: Annotated[float, Meta(gt=0)] = 1.0
    routers: Annotated[int, Meta(ge=1)] = 1
    sync_lag_s: _Seconds = 0.02
    tracks_output: bool = False
    polled: bool = False
    reports_late: bool = False
    incidents: tuple[Incident, ...] = ()
    seed: int = 0

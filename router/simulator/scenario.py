"""The fleet that a trace is replayed on, and what befalls it."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from router.simulator.engine_model import StepModel

_Seconds = Annotated[float, Meta(ge=0)]


class SlowDown(Struct, frozen=True, forbid_unknown_fields=True):
    """From a moment on, every step of a worker takes `slowness` times what its model says."""

    at_s: _Seconds
    worker: Annotated[int, Meta(ge=0)]
    slowness: Annotated[float, Meta(gt=0)]


class Failure(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker dies with all it holds, and is back, empty, after so long."""

    at_s: _Seconds
    worker: Annotated[int, Meta(ge=0)]
    down_s: Annotated[float, Meta(gt=0)]


Incident: TypeAlias = SlowDown | Failure


class Scenario(Struct, frozen=True, kw_only=True):
    """`models`: of each worker, by its id, from 0. `arrival_speed`: 2 halves the gaps between
    requests.

    Lags are those of the bus: from an engine to a router (events, reports), and from a router to
    its peers. `tracks_output`: callers tell the router of each block that an output grows by.
    """

    models: tuple[StepModel, ...]
    arrival_speed: Annotated[float, Meta(gt=0)] = 1.0
    event_lag_s: _Seconds = 0.05
    report_lag_s: _Seconds = 0.05
    report_interval_s: Annotated[float, Meta(gt=0)] = 1.0
    routers: Annotated[int, Meta(ge=1)] = 1
    sync_lag_s: _Seconds = 0.02
    tracks_output: bool = False
    incidents: tuple[Incident, ...] = ()
    seed: int = 0

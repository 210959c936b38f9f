"""The table of routes: purpose, request body, response and errors of each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from router.api.workers import BusyThresholdsReply, ModelThresholds
from router.core.views.accuracy import Misprediction, Predictions
from router.core.views.shadow import ShadowReport
from router.observability.recording import RecordingRequest, RecordingView
from router.protocol.batches import (
    MAX_SELECTIONS,
    MAX_STEPS,
    BatchReply,
    ReservationBatch,
    SelectBatch,
)
from router.protocol.capacity import PoolCapacity
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.dumps import Dump
from router.protocol.replicas import PeerGreeting, PeerView
from router.protocol.replies import (
    Decision,
    OverlapScoresReply,
    PotentialLoad,
    ReservationReply,
    ScopeLoads,
)
from router.protocol.requests import (
    BookRequest,
    BusyThresholdRequest,
    FreeRequest,
    OutputBlockRequest,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    PromptRequest,
    ReplicaPeerRequest,
    SelectRequest,
)
from router.protocol.workers import BlockHolders, WorkerPatch, WorkerRequest, WorkerView
from router.runtime.process.settings import SettingView


class ErrorResponse(Struct):
    """An error: a sentence, a code for programs, and the error's own fields."""

    error: str
    code: str


class Ok(Struct):
    """Success."""

    status: str


class Ready(Struct):
    """The readiness of the process. `schedulable_workers`: with scope `admin`.

    The rest with `?verbose`, which needs that scope. `degraded`: problems that do not prevent
    readiness. `mispredicted`: groups of requests with reported usage that differs from the
    prediction. `peers`: the other routers, if there is no bus.
    """

    ready: bool
    reason: str | None
    schedulable_workers: int | UnsetType = UNSET
    degraded: str | UnsetType | None = UNSET
    workers: list[WorkerView] | UnsetType = UNSET
    mispredicted: list[Misprediction] | UnsetType = UNSET
    peers: list[PeerView] | UnsetType = UNSET


_NO_QUERY: Mapping[str, str] = MappingProxyType({})


class Route(Struct, frozen=True):
    """One route: the name of its handler, its request body, its response and its errors.

    `is_hot`: served by the front, not by the application (`hot_routes.py`). `takes_binary`:
    tokens may be packed. `query`: its query parameters, with descriptions. `refusal`: the type of
    its error responses.
    """

    method: str
    path: str
    handler: str
    summary: str
    answer: Any
    body: Any = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    is_hot: bool = False
    takes_binary: bool = False
    query: Mapping[str, str] = _NO_QUERY
    refusal: Any = ErrorResponse


BODY = (400, 408, 413, 415, 422)
_BOOKING = (*BODY, 409, 503)
_SCOPE = {"model_name": "only this model", "routing_group": "only this routing group"}
_RANK = {"worker_id": "only this worker's rank", "dp_rank": "the rank; required with worker_id"}

OF_EVERY_PROCESS = (
    Route(
        "GET",
        "/ready",
        "ready",
        "The process is ready",
        Ready,
        refusals=(503,),
        query={"verbose": "with problems and workers; requires the scope admin"},
        is_hot=True,
        refusal=Ready,
    ),
    Route("GET", "/metrics", "metrics", "Prometheus metrics", str),
)

ROUTES = (
    Route(
        "POST",
        "/select",
        "select",
        "Select a rank for a prompt; with ?answer=headers the response has headers and no body",
        Decision,
        SelectRequest,
        refusals=(*BODY, 503),
        is_hot=True,
        takes_binary=True,
    ),
    Route(
        "POST",
        "/select_and_reserve",
        "select_and_reserve",
        "Select a rank and book it, or queue while all are busy; ?answer=headers as above",
        Decision,
        SelectRequest,
        refusals=(*_BOOKING, 429, 529),
        is_hot=True,
        takes_binary=True,
    ),
    Route(
        "POST",
        "/reservations",
        "reserve",
        "Book a rank that the caller chose",
        ReservationReply,
        BookRequest,
        status=201,
        refusals=(*_BOOKING, 404),
        is_hot=True,
        takes_binary=True,
    ),
    Route(
        "POST",
        "/reservations/{request_id}/prefill_complete",
        "prefill_complete",
        "Report the end of a prefill; the body may contain the engine's usage",
        Ok,
        PrefillCompleteRequest | None,
        refusals=(400, 404, 408, 413, 422),
        is_hot=True,
    ),
    Route(
        "POST",
        "/reservations/{request_id}/output_block",
        "output_block",
        "Report another output block of a booked request",
        Ok,
        OutputBlockRequest,
        refusals=(*BODY, 404),
        is_hot=True,
    ),
    Route(
        "DELETE",
        "/reservations/{request_id}",
        "free",
        "Release a reservation; the body may contain the engine's usage",
        Ok,
        FreeRequest | None,
        refusals=(400, 404, 408, 413, 422),
        is_hot=True,
    ),
    Route(
        "POST",
        "/select:batch",
        "select_batch",
        f"Select a rank for each of up to {MAX_SELECTIONS} prompts",
        BatchReply,
        SelectBatch,
        refusals=BODY,
    ),
    Route(
        "POST",
        "/reservations:batch",
        "reservation_batch",
        f"Up to {MAX_STEPS} steps of reservations: prefill_complete, output_block, free",
        BatchReply,
        ReservationBatch,
        refusals=BODY,
        is_hot=True,
    ),
    Route("GET", "/workers", "workers", "Every worker", list[WorkerView], query=_SCOPE),
    Route("GET", "/workers/{worker_id}", "worker", "One worker", WorkerView, refusals=(400, 404)),
    Route(
        "POST",
        "/workers",
        "register_worker",
        "Register a worker that the router subscribes to, or replace its registration",
        WorkerView,
        WorkerRequest,
        status=201,
        refusals=(*BODY, 409, 503),
    ),
    Route(
        "PATCH",
        "/workers/{worker_id}",
        "patch_worker",
        "Change a registered worker; cordon, drain or uncordon any worker",
        WorkerView,
        WorkerPatch,
        refusals=(*BODY, 404, 409, 503),
    ),
    Route(
        "DELETE",
        "/workers/{worker_id}",
        "remove_worker",
        "Remove a registered worker",
        WorkerView,
        refusals=(400, 404, 409),
    ),
    Route(
        "GET",
        "/replica_sync/peers",
        "replica_peers",
        "Endpoints of the routers that share reservations with this one",
        list[str],
    ),
    Route(
        "POST",
        "/replica_sync/register_peer",
        "change_replica_peers",
        "Refused: routers discover each other on the bus",
        Ok,
        ReplicaPeerRequest,
        refusals=(*BODY, 409),
    ),
    Route(
        "POST",
        "/replica_sync/deregister_peer",
        "change_replica_peers",
        "Refused: routers discover each other on the bus",
        Ok,
        ReplicaPeerRequest,
        refusals=(*BODY, 409),
    ),
    Route(
        "POST",
        "/replica_sync/stream",
        "replica_stream",
        "Reservations of this router, for another one without a bus: records, without an end",
        bytes,
        PeerGreeting,
        refusals=(*BODY, 409, 503),
    ),
    Route("GET", "/routers", "routers", "Routers of this namespace", list[RouterAnnouncement]),
    Route(
        "GET",
        "/config",
        "config",
        "Every setting, and its source",
        dict[str, SettingView],
    ),
    Route(
        "GET",
        "/busy_threshold",
        "busy_thresholds",
        "The thresholds above which ranks are busy, by model, and the busy ranks",
        BusyThresholdsReply,
    ),
    Route(
        "POST",
        "/busy_threshold",
        "change_busy_thresholds",
        "Change the thresholds of a model",
        ModelThresholds,
        BusyThresholdRequest,
        refusals=BODY,
    ),
    Route("GET", "/recording", "recording", "The recording of this router", RecordingView),
    Route(
        "POST",
        "/recording",
        "change_recording",
        "Begin or end a recording of every command and decision, for replay and simulation",
        RecordingView,
        RecordingRequest,
        refusals=(*BODY, 409),
    ),
    Route("GET", "/loads", "loads", "Booked load of every rank", list[ScopeLoads], query=_SCOPE),
    Route(
        "GET",
        "/capacity",
        "capacity",
        "Demand on each pool of workers, in predicted seconds, its supply, and the workers needed",
        list[PoolCapacity],
        query=_SCOPE,
    ),
    Route(
        "POST",
        "/potential_loads",
        "potential_loads",
        "Load of every rank, if a prompt were placed there; warnings are in x-kv-router-warnings",
        list[PotentialLoad],
        PotentialLoadsRequest,
        refusals=(*BODY, 503),
    ),
    Route(
        "POST",
        "/overlap_scores",
        "overlap_scores",
        "Cached prefix of a prompt on every rank",
        OverlapScoresReply,
        PromptRequest,
        refusals=(*BODY, 503),
        is_hot=True,
        takes_binary=True,
    ),
    Route(
        "GET",
        "/predictions",
        "predictions",
        "Cached tokens reported by engines, against the predictions, with diagnoses",
        Predictions,
    ),
    Route(
        "GET",
        "/shadow",
        "shadow",
        "Differences between this router's decisions and another router's",
        ShadowReport,
        refusals=(409,),
    ),
    Route(
        "GET",
        "/dump",
        "dump",
        "Every held block, as events; with ?worker_id= and dp_rank= those of one rank",
        Dump,
        refusals=(400,),
        query=_RANK,
    ),
    Route(
        "GET",
        "/blocks/{sequence_hash}",
        "block_holders",
        "The ranks that hold a block",
        BlockHolders,
        refusals=(400,),
    ),
    Route("GET", "/health", "health", "The process is alive", Ok),
    *OF_EVERY_PROCESS,
)

"""The routes: what each is for, reads, answers and refuses."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from router.block_views import BlockHolders
from router.busy_commands import BusyThresholdsReply, ModelThresholds
from router.prediction_views import Misprediction, Predictions
from router.process.effective import SettingView
from router.protocol.batches import (
    MAX_SELECTIONS,
    MAX_STEPS,
    BatchReply,
    ReservationBatch,
    SelectBatch,
)
from router.protocol.catalogue import RouterAnnouncement
from router.protocol.dumps import Dump
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
    PrefillCompleteRequest,
    PromptRequest,
    ReplicaPeerRequest,
    SelectRequest,
)
from router.protocol.workers import WorkerPatch, WorkerRegistration
from router.shadow import ShadowReport
from router.worker_views import WorkerView


class Refusal(Struct):
    """Why not: a sentence, a code for programs, and the error's own fields."""

    error: str
    code: str


class Ok(Struct):
    """Done."""

    status: str


class Ready(Struct):
    """Whether the process can be relied on; `degraded`: what is wrong although it can.
    `mispredicted`: groups of requests of which engines say otherwise than was predicted.
    """

    ready: bool
    reason: str | None
    degraded: str | None
    schedulable_workers: int
    workers: list[WorkerView] | UnsetType = UNSET
    mispredicted: list[Misprediction] | UnsetType = UNSET


_NO_QUERY: Mapping[str, str] = MappingProxyType({})


class Route(Struct, frozen=True):
    """One route: the name of its handler, the body it reads, what it answers and refuses.

    `is_hot`: the front answers it, not the application (`router/http/hot.py`). `takes_binary`:
    tokens may come packed. `query`: parameters that it looks at, and what they are for. `refusal`:
    what it refuses with.
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
    refusal: Any = Refusal


BODY = (400, 408, 413, 415, 422)
_BOOKING = (*BODY, 409, 503)
_SCOPE = {"model_name": "only this model", "routing_group": "only this routing group"}
_RANK = {"worker_id": "only this worker's rank", "dp_rank": "which of its ranks; beside it"}

OF_EVERY_PROCESS = (
    Route(
        "GET",
        "/ready",
        "ready",
        "The process can be relied on",
        Ready,
        refusals=(503,),
        refusal=Ready,
    ),
    Route("GET", "/metrics", "metrics", "Prometheus metrics", str),
)

ROUTES = (
    Route(
        "POST",
        "/select",
        "select",
        "Choose a rank for a prompt; with ?answer=headers the answer is in headers, without a body",
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
        "Choose a rank and book it, if all are busy once one is free; ?answer=headers as above",
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
        "A booked prompt is computed; its body may say its engine's usage",
        Ok,
        PrefillCompleteRequest | None,
        refusals=(400, 404, 408, 413, 422),
        is_hot=True,
    ),
    Route(
        "POST",
        "/reservations/{request_id}/output_block",
        "output_block",
        "A booked request grew by a block",
        Ok,
        OutputBlockRequest,
        refusals=(*BODY, 404),
        is_hot=True,
    ),
    Route(
        "DELETE",
        "/reservations/{request_id}",
        "free",
        "A booked request ended; its body may say its engine's usage",
        Ok,
        FreeRequest | None,
        refusals=(400, 404, 408, 413, 422),
        is_hot=True,
    ),
    Route(
        "POST",
        "/select:batch",
        "select_batch",
        f"Choose a rank for each of up to {MAX_SELECTIONS} prompts",
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
        "Register a worker whose engines the router follows itself, or replace its registration",
        WorkerView,
        WorkerRegistration,
        status=201,
        refusals=(*BODY, 409, 503),
    ),
    Route(
        "PATCH",
        "/workers/{worker_id}",
        "patch_worker",
        "Change a registered worker; cordon any, drain it, or let it serve again",
        WorkerView,
        WorkerPatch,
        refusals=(*BODY, 404, 409, 503),
    ),
    Route(
        "DELETE",
        "/workers/{worker_id}",
        "remove_worker",
        "Forget a registered worker",
        WorkerView,
        refusals=(400, 404, 409),
    ),
    Route(
        "GET",
        "/replica_sync/peers",
        "replica_peers",
        "Where other routers are that share reservations with this one",
        list[str],
    ),
    Route(
        "POST",
        "/replica_sync/register_peer",
        "change_replica_peers",
        "Refused: routers find each other on the bus",
        Ok,
        ReplicaPeerRequest,
        refusals=(*BODY, 409),
    ),
    Route(
        "POST",
        "/replica_sync/deregister_peer",
        "change_replica_peers",
        "Refused: routers find each other on the bus",
        Ok,
        ReplicaPeerRequest,
        refusals=(*BODY, 409),
    ),
    Route("GET", "/routers", "routers", "Routers of this namespace", list[RouterAnnouncement]),
    Route(
        "GET",
        "/config",
        "config",
        "Every setting, and where it comes from",
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
    Route("GET", "/loads", "loads", "Booked load of every rank", list[ScopeLoads], query=_SCOPE),
    Route(
        "POST",
        "/potential_loads",
        "potential_loads",
        "Load of every rank, were a prompt there",
        list[PotentialLoad],
        PromptRequest,
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
    ),
    Route(
        "GET",
        "/predictions",
        "predictions",
        "What engines had cached of prompts, against what was predicted, and what is wrong",
        Predictions,
    ),
    Route(
        "GET",
        "/shadow",
        "shadow",
        "How our choices would have differed from another router's",
        ShadowReport,
        refusals=(409,),
    ),
    Route(
        "GET",
        "/dump",
        "dump",
        "Every held block, as events; with ?worker_id= and dp_rank= a rank's",
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
    Route("GET", "/health", "health", "The process lives", Ok),
    *OF_EVERY_PROCESS,
)

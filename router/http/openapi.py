"""The routes, and what OpenAPI says of them. Schemas come from the types that decode and encode."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, Struct, UnsetType

from router.block_views import BlockHolders
from router.busy_commands import BusyThresholdsReply, ModelThresholds
from router.process.effective import SettingView
from router.protocol.batches import (
    MAX_SELECTIONS,
    MAX_STEPS,
    BatchReply,
    ReservationBatch,
    ReservationStep,
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
    OutputBlockRequest,
    PrefillCompleteRequest,
    PromptRequest,
    ReplicaPeerRequest,
    SelectRequest,
)
from router.protocol.values import U64_MAX
from router.protocol.workers import WorkerPatch, WorkerRegistration
from router.shadow import ShadowReport
from router.views import WorkerView


class Refusal(Struct):
    """Why not: a sentence, a code for programs, and the error's own fields."""

    error: str
    code: str


class Ok(Struct):
    """Done."""

    status: str


class Ready(Struct):
    """Whether the process can be relied on; `degraded`: what is wrong although it can."""

    ready: bool
    reason: str | None
    degraded: str | None
    schedulable_workers: int
    workers: list[WorkerView] | UnsetType = UNSET


class Route(Struct, frozen=True):
    """One route: the name of its handler, the body it reads, what it answers and refuses.

    `is_hot`: the front answers it, not the application (`router/http/hot.py`).
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


BODY = (400, 408, 413, 415, 422)
_BOOKING = (*BODY, 409, 503)

ROUTES = (
    Route(
        "POST",
        "/select",
        "select",
        "Choose a rank for a prompt",
        Decision,
        SelectRequest,
        refusals=(*BODY, 503),
        is_hot=True,
    ),
    Route(
        "POST",
        "/select_and_reserve",
        "select_and_reserve",
        "Choose a rank and book it, if all are busy once one is free",
        Decision,
        SelectRequest,
        refusals=(*_BOOKING, 429, 529),
        is_hot=True,
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
        "A booked request ended",
        Ok,
        refusals=(404,),
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
    ),
    Route("GET", "/workers", "workers", "Every worker", list[WorkerView]),
    Route("GET", "/workers/{worker_id}", "worker", "One worker", WorkerView, refusals=(400, 404)),
    Route(
        "POST",
        "/workers",
        "register_worker",
        "Register a worker whose engines the router hears itself, or say anew what it is",
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
        "Above what a rank of each model is busy, and who is",
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
    Route("GET", "/loads", "loads", "Booked load of every rank", list[ScopeLoads]),
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
    ),
    Route(
        "GET",
        "/blocks/{sequence_hash}",
        "block_holders",
        "Who holds a block",
        BlockHolders,
        refusals=(400,),
    ),
    Route("GET", "/health", "health", "The process lives", Ok),
    Route("GET", "/ready", "ready", "The process can be relied on", Ready, refusals=(503,)),
    Route("GET", "/metrics", "metrics", "Prometheus metrics", str),
)

_REASONS = {
    400: "the body is not JSON, or what it says can not be true",
    404: "no such worker, reservation or index",
    408: "the body did not arrive in time",
    409: "the id is taken, or what is there contradicts it",
    413: "the body is too large",
    415: "the body is not application/json",
    422: "a field is missing, or has the wrong type or range",
    429: "as much of this tenant waits as its share of a full queue; see Retry-After",
    501: "this version lacks it",
    503: "nobody can take it now",
    529: "all are busy and no more may wait, or it waited too long; see Retry-After",
}


def document(app: FastAPI, routes: Sequence[Route]) -> None:
    """Add the schemas of bodies and answers to what the app says of itself."""
    types = [t for route in routes for t in (route.body, route.answer) if t is not None]
    named = [*types, Refusal, ReservationStep]  # items of batches are named, not typed
    _, components = msgspec.json.schema_components(named, ref_template=_REF)
    for name in ("PromptRequest", "SelectRequest"):
        if name in components:
            components[name]["anyOf"] = _PROMPTS
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def extra(route: Route) -> dict[str, Any]:
    """Parameters, request body and responses of a route, in OpenAPI's terms."""
    result: dict[str, Any] = {
        "responses": {str(route.status): _content("The answer", route.answer)}
        | {str(status): _content(_REASONS[status], Refusal) for status in route.refusals}
    }
    if route.body is not None:
        content = _content("", route.body)["content"]
        result["requestBody"] = {"required": not _is_optional(route.body), "content": content}
    names = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
    if names:
        result["parameters"] = [_parameter(name) for name in names]
    return result


_REF = "#/components/schemas/{name}"

_NUMBERS = ("worker_id", "sequence_hash")
"""Parts of paths that are numbers."""

_PROMPTS = [
    {"required": ["token_ids"], "properties": {"token_ids": {"type": "array"}}},
    {
        "required": ["sequence_hashes", "isl_tokens"],
        "properties": {"sequence_hashes": {"type": "array"}, "isl_tokens": {"type": "integer"}},
    },
]
"""A prompt comes as tokens or as hashes."""


def _is_optional(body: Any) -> bool:
    return type(None) in getattr(body, "__args__", ())


def _content(description: str, answer: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([answer], ref_template=_REF)
    media_type = "text/plain" if answer is str else "application/json"
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    if name in _NUMBERS:
        schema = {"type": "integer", "minimum": 0, "maximum": U64_MAX}
    return {"name": name, "in": "path", "required": True, "schema": schema}

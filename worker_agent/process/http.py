"""HTTP helpers and metrics of an agent's ranks, for both kinds of agent."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from router.errors import KvRouterError
from router.protocol.values import Tier
from router.runtime.process.metrics import Rows, counter, gauge
from worker_agent.process.presence import RankOnBus

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def answering(handler: Handler) -> Handler:
    """Wrap a handler so that its errors have OpenAI's format."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except KvRouterError as error:
            body = {
                "message": str(error),
                "type": "invalid_request_error" if error.http_status < 500 else "server_error",
                "param": error.body().get("field"),
                "code": error.code,
            }
            return json_response({"error": body}, error.http_status)

    return answer


def dump_response(worker_id: int, ranks: Sequence[RankOnBus]) -> Response:
    """Return all blocks by rank and tier, including changes not yet published to routers."""
    held = {
        str(each.rank.dp_rank): {
            tier.name.lower(): each.events.held(tier).tolist() for tier in Tier
        }
        for each in ranks
    }
    events = {str(each.rank.dp_rank): each.events.published.event_id for each in ranks}
    return json_response({"worker_id": worker_id, "event_ids": events, "ranks": held})


def metrics_response(registry: CollectorRegistry) -> Response:
    """Return Prometheus metrics."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


RANK_LABELS = ("model_name", "dp_rank")
BUS_METRICS: Rows = {
    "publish_failures": counter("Event messages that the bus did not accept", "events.failures"),
    "publish_refusals": counter("Event messages rejected by a full stream", "events.refusals"),
    "publish_waiting_seconds": gauge(
        "Age of the oldest change that is not in the log yet", "events.waiting_s"
    ),
    "load_reports_missed": counter("Load reports that could not be sent", "loads.missed"),
    "queries_answered": counter("Queries on events and load that were served", "answers.answered"),
    "queries_refused": counter(
        "Queries that were malformed, or beyond the limit of waiting ones", "answers.refused"
    ),
    "answers_undelivered": counter("Responses that the bus did not accept", "answers.undelivered"),
}

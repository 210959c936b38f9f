"""What the HTTP servers of both kinds of agent share."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from router.protocol.values import Tier
from worker_agent.presence import RankOnBus

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def dump_response(worker_id: int, ranks: Sequence[RankOnBus]) -> Response:
    """Every block held, by rank and tier, as it was or will be told to routers."""
    held = {
        str(each.rank.dp_rank): {
            tier.name.lower(): each.events.held(tier).tolist() for tier in Tier
        }
        for each in ranks
    }
    events = {str(each.rank.dp_rank): each.events.published.event_id for each in ranks}
    return json_response({"worker_id": worker_id, "event_ids": events, "ranks": held})


def metrics_response(registry: CollectorRegistry) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

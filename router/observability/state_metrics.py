"""Metrics of the state of a router, read at scrape time."""

import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from operator import attrgetter

from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, Info

from router.core.core import RouterCore
from router.core.selections import Selections
from router.core.views.shadow import Shadow
from router.indexer.base import IndexStats
from router.observability.health import ServiceStatus
from router.runtime.process.metrics import Row, Rows, counter, expose, expose_each, gauge
from router.scheduler.queue.class_queue import ClassQueue
from router.sequence.active.promises import OUTCOMES, Outcome

_PREFIX = "kv_router_"
_SCOPE = ("model_name", "routing_group")

_CORE: Rows = {
    "up": gauge("1 while the process runs", lambda _: 1),
    "workers": gauge("Workers known", lambda core: len(core.fleet)),
    "reservations": gauge("Live reservations", lambda core: len(core.tracker)),
    "slo_promises": gauge("Live reservations with objectives", "tracker.promises.live_count"),
    "waiting_requests_max": gauge("Limit on requests that wait", "waiting.limits.max_requests"),
    "index_differences": counter("Ranks found to differ from their agent's", "index.differences"),
    "load_reports_stale": counter("Load reports doubled or out of order", "fleet.stale_reports"),
    "index_refused_messages": counter(
        "Messages over the limit on blocks", "index.refused_messages"
    ),
    "predicted_blocks": gauge(
        "Blocks estimated from decisions",
        lambda core: {astuple(s): count for s, count in core.predictions.entry_counts().items()},
        *_SCOPE,
    ),
    "predicted_blocks_expired": counter(
        "Estimated blocks that expired", lambda core: core.predictions.freed_blocks()[0]
    ),
    "predicted_blocks_pruned": counter(
        "Estimated blocks pruned at the limit", lambda core: core.predictions.freed_blocks()[1]
    ),
    "predicted_prompts_refused": counter(
        "Reserved prompts beyond the limit", "predictions.refused_prompts"
    ),
}
_OBJECTIVES: Rows = {
    "slo_requests": counter(
        "Requests with objectives that are over: met, missed, refused, or not known",
        lambda totals: {outcome: totals[outcome] for outcome in OUTCOMES},
        "outcome",
    )
}
_BUS: Rows = {"bus_connected": gauge("1 while connected to NATS", "fleet.is_connected")}
_INDEX: Rows = {
    "blocks": gauge("Distinct blocks in the index, those waiting to be swept included"),
    "max_blocks": gauge("Limit on distinct blocks"),
    "holder_sets": gauge("Distinct sets of several holders"),
    "unswept_holders": gauge("Cleared ranks with blocks not freed yet"),
    "checked_answers": gauge("Searches repeated by walking, as a check"),
    "differing_answers": gauge("Overlaps that a second, walking search found to differ"),
}
_WAITING: Rows = {
    "waiting_requests": gauge("Requests waiting", "usage.requests"),
    "waiting_tokens": gauge("Their uncached prompt tokens", "usage.cost_tokens"),
}


def expose_state(registry: CollectorRegistry, core: RouterCore, status: ServiceStatus) -> None:
    """Add the metrics of a core, and of the process."""
    Info("kv_router", "Router version", registry=registry).info({"version": version("kv-router")})
    ready = gauge("1 while ready", lambda core: status.readiness(core).is_ready)
    bus = _BUS if status.has_bus else {}
    expose(registry, _PREFIX, {**_CORE, **bus, "ready": ready}, core)

    def queues() -> Iterator[tuple[tuple[str, ...], ClassQueue]]:
        for scope, queue in core.waiting.queues():
            for each in queue.queues:
                yield (*astuple(scope), each.settings.name), each

    expose_each(registry, _PREFIX, _WAITING, (*_SCOPE, "policy_class"), queues)

    def classes() -> Iterator[tuple[tuple[str, ...], Counter[Outcome]]]:
        for (scope, policy_class), totals in core.tracker.promises.totals.items():
            yield (*astuple(scope), policy_class), totals

    expose_each(registry, _PREFIX, _OBJECTIVES, (*_SCOPE, "policy_class"), classes)

    def indexes() -> Iterator[tuple[tuple[str, ...], IndexStats]]:
        return ((astuple(scope), stats) for scope, stats in core.index.stats().items())

    expose_each(registry, f"{_PREFIX}index_", _INDEX, _SCOPE, indexes)


def _of_sides(text: str, name: str) -> Row:
    read = attrgetter(name)
    return counter(text, lambda t: {"ours": read(t.ours), "theirs": read(t.theirs)}, "side")


_SHADOW: Rows = {
    "requests": counter(
        "Requests compared, by how the choices differ",
        lambda totals: {
            "agreed": totals.agreed,
            "tied": totals.tied,
            "differed": totals.compared - totals.agreed - totals.tied,
            "unknown_rank": totals.unknown_ranks,
        },
        "outcome",
    ),
    "isl_tokens": counter("Prompt tokens of compared requests"),
    "predicted_cached_tokens": _of_sides(
        "Prompt tokens predicted cached", "predicted_cached_tokens"
    ),
    "projected_prefill_tokens": _of_sides(
        "Prefill load of the chosen ranks", "projected_prefill_tokens"
    ),
    "predicted_ttft_seconds": _of_sides(
        "Predicted times to the first token on the chosen ranks", "predicted_ttft_s"
    ),
}
_SHADOW_LIMIT: Rows = {"uncounted": counter("Requests not counted: too many scopes")}


def expose_shadow(registry: CollectorRegistry, shadow: Shadow) -> None:
    """Add the totals of a shadow by scope, and by side for values that both sides have."""
    prefix = f"{_PREFIX}shadow_"
    expose(registry, prefix, _SHADOW_LIMIT, shadow)
    expose_each(
        registry,
        prefix,
        _SHADOW,
        _SCOPE,
        lambda: ((astuple(scope), totals) for scope, totals in shadow.scopes.items()),
    )


SESSION_METRICS: Rows = {
    "sessions": gauge("Sessions bound to a rank, as known here", len),
    "sessions_expired": counter("Sessions removed as idle", "expired"),
    "sessions_evicted": counter("Sessions removed at the limit", "evicted"),
}
REGISTRATION_METRICS: Rows = {
    "registered_ranks": gauge("Ranks registered", "rank_count"),
    "registered_ranks_max": gauge("Limit on ranks registered", "max_ranks"),
}
_SPLITS: Rows = {"split_requests": counter("Requests of a split group, by the group chosen", int)}
_SELECTIONS: Rows = {
    "selections": gauge("Selections that may be reserved", len),
    "selections_bytes": gauge("Approximate memory of those", "size_bytes"),
    "selections_ended": counter("Selections no longer kept, by outcome", "counts", "outcome"),
}


def expose_selections(registry: CollectorRegistry, selections: Selections) -> None:
    """Add the selections that can still be reserved, and the outcomes of the others."""

    def read() -> Iterator[tuple[tuple[()], Selections]]:
        selections.expire(time.monotonic())
        yield (), selections

    expose_each(registry, _PREFIX, _SELECTIONS, (), read)


def expose_splits(registry: CollectorRegistry, counts: Counter[tuple[str, str]]) -> None:
    """Add the requests of split groups, by the group that they name and the one chosen."""
    labels = ("asked_group", "routing_group")
    expose_each(registry, _PREFIX, _SPLITS, labels, lambda: iter(list(counts.items())))

"""Metrics of an agent next to an engine."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from router.publisher.follower.follower_metrics import expose_followers
from router.runtime.process.metrics import Rows, counter, expose, expose_each, gauge
from worker_agent.bridge.engine_tiers import EngineTiers
from worker_agent.bridge.metrics_poll import MetricsPoll
from worker_agent.bridge.rank import BridgedRank
from worker_agent.operations.metrics import BLOCKSETS, IMPORTED_TEXT, expose_levels
from worker_agent.process.http import BUS_METRICS, RANK_LABELS

_RANK: Rows = {
    "engine_load_reports": counter(
        "Reports of the engine's load, from its load socket or its metrics",
        "follower.engine_loads.reports",
    ),
    **BUS_METRICS,
    "tiers_known": gauge(
        "1 while the blocks of the block manager in the engine are known",
        lambda rank: rank.tiers is not None and rank.tiers.is_current,
    ),
    "tiers_held_blocks": gauge(
        "Blocks in the tiers of the block manager in the engine, once per tier",
        lambda rank: 0 if rank.tiers is None else rank.tiers.held_blocks,
    ),
    "tiers_messages": counter(
        "Messages from the block manager in the engine",
        lambda rank: 0 if rank.tiers is None else rank.tiers.messages,
    ),
    "tiers_snapshots": counter(
        "Reports of all its blocks by the block manager in the engine",
        lambda rank: 0 if rank.tiers is None else rank.tiers.snapshots,
    ),
    "tiers_failures": counter(
        "Connections to the block manager in the engine that failed",
        lambda rank: 0 if rank.tiers is None else rank.tiers.failures,
    ),
}
_TIERS: Rows = {
    "tier_command_failures": counter(
        "Commands that the block manager in the engine did not execute", "failures"
    ),
}
_SHARING: Rows = {"blocksets_imported": gauge(IMPORTED_TEXT, lambda count: count)}
_POLL: Rows = {
    "metrics_readings": counter("Readings of the engine's metrics", "readings"),
    "metrics_failures": counter("Readings of the engine's metrics that failed", "failures"),
    "metrics_readable": gauge(
        "1 if the last reading of the engine's metrics succeeded", lambda poll: poll.problem is None
    ),
}


def bridge_metrics(
    read_model_name: Callable[[], str],
    read_ranks: Callable[[], Sequence[BridgedRank]],
    poll: MetricsPoll | None,
    tiers: EngineTiers | None = None,
) -> CollectorRegistry:
    """Return the metrics of all ranks, of the polling of the engine's own, and of its tiers."""
    registry = CollectorRegistry()
    expose_followers(registry, lambda: [rank.follower for rank in read_ranks()])
    expose_each(
        registry,
        "kv_agent_",
        _RANK,
        RANK_LABELS,
        lambda: (((read_model_name(), rank.rank.dp_rank), rank) for rank in read_ranks()),
    )
    if tiers is not None:
        expose_levels(registry, read_model_name, lambda: tiers.reports)
        expose(registry, "kv_agent_", _TIERS, tiers)
        _expose_sharing(registry, read_model_name, tiers)
    if poll is not None:
        expose(registry, "kv_agent_", _POLL, poll)
    return registry


def _expose_sharing(
    registry: CollectorRegistry, read_model_name: Callable[[], str], tiers: EngineTiers
) -> None:
    """Add the metrics of blocksets, under the names that an agent with its own engine has."""
    prefix = "kv_agent_share_"
    expose_each(
        registry, prefix, BLOCKSETS, ("model_name",), lambda: [((read_model_name(),), tiers)]
    )
    expose_each(
        registry,
        prefix,
        _SHARING,
        RANK_LABELS,
        lambda: (
            ((read_model_name(), dp_rank), count) for dp_rank, count in tiers.imported.items()
        ),
    )

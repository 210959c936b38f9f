"""Metrics of an agent's tiers: by level under our names, and under Dynamo's names.

Dynamo's `kvbm_*` without `_total` are counters, exported under the exact names its dashboards use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry

from router.runtime.process.metrics import (
    Row,
    Rows,
    Subjects,
    counter,
    expose_each,
    gauge,
    unknown,
)
from worker_agent.blocks.names import CacheLevel
from worker_agent.operations.messages import LevelReport, TierTraffic
from worker_agent.process.http import RANK_LABELS

G1, G2, G3, G4 = CacheLevel

_LEVEL: Rows = {
    "blocks": gauge("Capacity in blocks", "num_blocks"),
    "active_blocks": gauge("Blocks in use"),
    "inactive_blocks": gauge("Blocks kept, not in use"),
}
_TRAFFIC: Rows = {
    "stored_blocks": counter("Blocks taken from the tier above", "traffic."),
    "stored_bytes": counter("The same in bytes", "traffic."),
    "store_seconds": counter("Time spent storing", "traffic.store_s"),
    "store_failures": counter("Blocks that could not be stored", "traffic."),
    "loaded_blocks": counter("Blocks copied to the device", "traffic."),
    "loaded_bytes": counter("The same in bytes", "traffic."),
    "load_seconds": counter("Time spent loading", "traffic.load_s"),
    "load_failures": counter("Blocks that could not be loaded", "traffic."),
    "corrupt_blocks": counter("Blocks with wrong bytes", "traffic."),
    "adopted_blocks": counter("Blocks recovered at start", "traffic."),
    "unproven_blocks": counter("Persisted blocks not recovered", "traffic."),
    "dropped_blocks": counter("Blocks not stored: queue full", "traffic."),
    "waiting_blocks": gauge("Blocks queued for storing", "traffic."),
    "pace_bytes_per_second": gauge("Present limit of storing", "traffic.pace_bytes_per_s"),
    "broken": gauge("1 if it failed, and is no longer used", "traffic.is_broken"),
}
_POOL: Rows = {
    "allocations": counter("Blocks allocated", "pool."),
    "allocations_from_reset": counter(
        "Of those, blocks that were empty before",
        lambda report: report.pool.allocations - report.pool.evictions,
    ),
    "evictions": counter("Of those, blocks that evicted another", "pool."),
    "registrations": counter("Blocks registered under a new name", "pool."),
    "duplicate_blocks": counter("Duplicate blocks kept", "pool.kept_duplicates"),
    "registration_dedup": counter("Duplicate blocks", "pool.duplicates"),
    "stagings": counter(
        "Blocks that were filled",
        lambda report: report.pool.registrations + report.pool.duplicates,
    ),
    "match_hashes_requested": counter("Blocks requested", "pool.requested"),
    "match_blocks_returned": counter("Of those, blocks found", "pool.matched"),
    "scan_hashes_requested": counter("Blocks searched for", "pool.scanned"),
    "scan_blocks_returned": counter("Of those, blocks found", "pool.found"),
    "inflight_mutable": gauge("Blocks in use, unregistered", "private_blocks"),
    "inflight_immutable": gauge(
        "Blocks in use, registered", lambda report: report.active_blocks - report.private_blocks
    ),
    "reset_pool_size": gauge("Empty blocks", "empty_blocks"),
    "inactive_pool_size": gauge("Blocks kept, not in use", "inactive_blocks"),
}


BLOCKSETS: Rows = {"blocksets_refused": counter("Announced blocksets of no use here", "refusals")}
"""Of an agent that imports blocksets, or of the one beside the engine that does."""
IMPORTED_TEXT = "Blocksets of other workers imported"


class _Rank(Struct, frozen=True):
    """The traffic of a rank's tiers, in blocks of `block_size` of all `prompt_tokens`."""

    tiers: Mapping[CacheLevel, TierTraffic]
    block_size: int
    prompt_tokens: int

    def sum(self, field: str, *levels: CacheLevel) -> float:
        """Return the sum of a field over the levels that the rank has."""
        return float(sum(getattr(self.tiers[each], field) for each in levels if each in self.tiers))

    def hit_rate(self, level: CacheLevel) -> float | None:
        """Return the share of prompt tokens loaded from a level, or None without that level."""
        if level not in self.tiers:
            return None
        loaded_tokens = self.block_size * self.tiers[level].loaded_blocks
        return loaded_tokens / max(self.prompt_tokens, 1)


def _sum(text: str, field: str, *levels: CacheLevel) -> Row:
    return unknown(text, lambda rank: rank.sum(field, *levels))


def _stored_on_disk(text: str, *, has_host: bool) -> Row:
    """Return the row of blocks stored on disk by ranks with or without a host tier."""
    return unknown(
        text, lambda rank: rank.sum("stored_blocks", G3) if (G2 in rank.tiers) is has_host else 0
    )


def _hit_rate(level: CacheLevel) -> Row:
    text = f"Share of prompt tokens that came from {level}"
    return gauge(text, lambda rank: rank.hit_rate(level))


_RANK: Rows = {
    "offload_requests": _sum("Batches stored", "store_calls", G2, G3, G4),
    "offload_blocks_d2h": _sum("From device to host", "stored_blocks", G2),
    "offload_blocks_h2d": _stored_on_disk("From host to disk", has_host=True),
    "offload_blocks_d2d": _stored_on_disk("From device to disk", has_host=False),
    "onboard_blocks_h2d": _sum("From host to device", "loaded_blocks", G2),
    "onboard_blocks_d2d": _sum("From disk to device", "loaded_blocks", G3),
    "object_read_failures": _sum("Blocks not read from the shared store", "load_failures", G4),
    "object_write_failures": _sum("Blocks not written to the shared store", "store_failures", G4),
    "matched_tokens": unknown(
        "Prompt tokens that came from tiers",
        lambda rank: rank.block_size * rank.sum("loaded_blocks", *rank.tiers),
    ),
    "host_cache_hit_rate": _hit_rate(G2),
    "disk_cache_hit_rate": _hit_rate(G3),
    "object_cache_hit_rate": _hit_rate(G4),
}


def expose_tiers(
    registry: CollectorRegistry,
    model_name: str,
    block_size: int,
    read_reports: Callable[[], Sequence[LevelReport]],
    read_prompt_tokens: Callable[[], Mapping[int, int]],
) -> None:
    """Add the metrics of all tiers. Prompt tokens are those of each rank, computed and cached."""
    expose_levels(registry, lambda: model_name, read_reports)

    def ranks() -> Iterator[tuple[tuple[str, int], _Rank]]:
        tiers = {
            (each.dp_rank, each.level): each.traffic
            for each in read_reports()
            if each.traffic is not None
        }
        for dp_rank, prompt_tokens in read_prompt_tokens().items():
            ours = {level: traffic for (rank, level), traffic in tiers.items() if rank == dp_rank}
            yield (model_name, dp_rank), _Rank(ours, block_size, prompt_tokens)

    expose_each(registry, "kvbm_", _RANK, RANK_LABELS, ranks)


def expose_levels(
    registry: CollectorRegistry,
    read_model_name: Callable[[], str],
    read_reports: Callable[[], Sequence[LevelReport]],
) -> None:
    """Add the metrics of each tier, and of its pool."""

    def reports(attribute: str) -> Subjects:
        return lambda: (
            ((read_model_name(), each.dp_rank, each.level), each)
            for each in read_reports()
            if getattr(each, attribute) is not None
        )

    level, pool = (*RANK_LABELS, "level"), (*RANK_LABELS, "pool")
    expose_each(registry, "kv_agent_tier_", _LEVEL, level, reports("level"))
    expose_each(registry, "kv_agent_tier_", _TRAFFIC, level, reports("traffic"))
    expose_each(registry, "kvbm_", _POOL, pool, reports("pool"))

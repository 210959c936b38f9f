"""What an agent tells Prometheus of its tiers: ours by level, and Dynamo's names beside them.

Dynamo's `kvbm_*` without `_total` are counters under the very names that its dashboards ask for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)

from worker_agent.blocks.levels import CacheLevel
from worker_agent.operations.messages import LevelReport, TierTraffic

G1, G2, G3, G4 = CacheLevel
Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[UnknownMetricFamily]


class _Reading(Struct, frozen=True):
    """One metric of every tier, and how it is read off a report; None where there is none."""

    family: Family
    name: str
    text: str
    read: Callable[[LevelReport], float | None]


def _through(
    name: str, text: str, read: Callable[[TierTraffic], float], family: Family = CounterMetricFamily
) -> _Reading:
    return _Reading(
        family,
        f"kv_agent_tier_{name}",
        text,
        lambda report: None if report.traffic is None else read(report.traffic),
    )


def _of_pool(name: str, text: str, field: str) -> _Reading:
    return _Reading(
        CounterMetricFamily,
        f"kvbm_{name}",
        text,
        lambda report: None if report.pool is None else getattr(report.pool, field),
    )


def _gauge(name: str, text: str, read: Callable[[LevelReport], float]) -> _Reading:
    return _Reading(GaugeMetricFamily, name, text, read)


_BY_LEVEL: tuple[_Reading, ...] = (
    _gauge("kv_agent_tier_blocks", "Blocks there is room for", lambda r: r.num_blocks),
    _gauge("kv_agent_tier_active_blocks", "Blocks in use", lambda r: r.active_blocks),
    _gauge("kv_agent_tier_inactive_blocks", "Blocks kept, not in use", lambda r: r.inactive_blocks),
    _through("stored_blocks", "Blocks taken from the tier above", lambda t: t.stored_blocks),
    _through("stored_bytes", "The same in bytes", lambda t: t.stored_bytes),
    _through("store_seconds", "Time spent storing", lambda t: t.store_s),
    _through("store_failures", "Blocks that could not be stored", lambda t: t.store_failures),
    _through("loaded_blocks", "Blocks given to the device", lambda t: t.loaded_blocks),
    _through("loaded_bytes", "The same in bytes", lambda t: t.loaded_bytes),
    _through("load_seconds", "Time spent loading", lambda t: t.load_s),
    _through("load_failures", "Blocks that could not be loaded", lambda t: t.load_failures),
    _through("corrupt_blocks", "Blocks whose bytes were wrong", lambda t: t.corrupt_blocks),
    _through("adopted_blocks", "Blocks taken over from a former life", lambda t: t.adopted_blocks),
    _through("unproven_blocks", "Blocks of a former life not read in time",
             lambda t: t.unproven_blocks),
    _through("dropped_blocks", "Blocks not stored: too many waited", lambda t: t.dropped_blocks),
    _through("waiting_blocks", "Blocks to be stored", lambda t: t.waiting_blocks,
             GaugeMetricFamily),
    _through("pace_bytes_per_second", "At most so many are stored now",
             lambda t: t.pace_bytes_per_s, GaugeMetricFamily),
    _through("broken", "1: it failed, and is asked no more", lambda t: t.is_broken,
             GaugeMetricFamily),
)  # fmt: skip

_BY_POOL: tuple[_Reading, ...] = (
    _of_pool("allocations", "Blocks allocated", "allocations"),
    _Reading(
        CounterMetricFamily,
        "kvbm_allocations_from_reset",
        "Of those, so many held nothing before",
        lambda r: None if r.pool is None else r.pool.allocations - r.pool.evictions,
    ),
    _of_pool("evictions", "Of those, so many held something", "evictions"),
    _of_pool("registrations", "Blocks registered under a new name", "registrations"),
    _of_pool("duplicate_blocks", "Blocks kept whose name another had", "kept_duplicates"),
    _of_pool("registration_dedup", "Blocks whose name another had", "duplicates"),
    _Reading(
        CounterMetricFamily,
        "kvbm_stagings",
        "Blocks that were filled",
        lambda r: None if r.pool is None else r.pool.registrations + r.pool.duplicates,
    ),
    _of_pool("match_hashes_requested", "Blocks asked for", "requested"),
    _of_pool("match_blocks_returned", "Of those, so many were there", "matched"),
    _of_pool("scan_hashes_requested", "Blocks looked for", "scanned"),
    _of_pool("scan_blocks_returned", "Of those, so many were there", "found"),
    _gauge("kvbm_inflight_mutable", "Blocks in use, to be named", lambda r: r.private_blocks),
    _gauge("kvbm_inflight_immutable", "Blocks in use, named",
           lambda r: r.active_blocks - r.private_blocks),
    _gauge("kvbm_reset_pool_size", "Blocks that hold nothing", lambda r: r.empty_blocks),
    _gauge("kvbm_inactive_pool_size", "Blocks kept, not in use", lambda r: r.inactive_blocks),
)  # fmt: skip

RankTiers: TypeAlias = Mapping[CacheLevel, TierTraffic]


class _Summary(Struct, frozen=True):
    """One of Dynamo's metrics of a whole rank."""

    name: str
    text: str
    read: Callable[[RankTiers], float]


def _sum(field: str, *levels: CacheLevel) -> Callable[[RankTiers], float]:
    return lambda tiers: sum(getattr(tiers[level], field) for level in levels if level in tiers)


def _only(when: bool, read: Callable[[RankTiers], float]) -> Callable[[RankTiers], float]:
    """Through the host if there is one; `when`: with it, or without."""
    return lambda tiers: read(tiers) if (G2 in tiers) is when else 0


_OF_RANK: tuple[_Summary, ...] = (
    _Summary("offload_requests", "Batches stored", _sum("store_calls", G2, G3, G4)),
    _Summary("offload_blocks_d2h", "From device to host", _sum("stored_blocks", G2)),
    _Summary("offload_blocks_h2d", "From host to disk", _only(True, _sum("stored_blocks", G3))),
    _Summary("offload_blocks_d2d", "From device to disk", _only(False, _sum("stored_blocks", G3))),
    _Summary("onboard_blocks_h2d", "From host to device", _sum("loaded_blocks", G2)),
    _Summary("onboard_blocks_d2d", "From disk to device", _sum("loaded_blocks", G3)),
    _Summary("object_read_failures", "Blocks the shared store did not give",
             _sum("load_failures", G4)),
    _Summary("object_write_failures", "Blocks the shared store did not take",
             _sum("store_failures", G4)),
)  # fmt: skip

_HIT_RATES = {G2: "host", G3: "disk", G4: "object"}


def tier_metrics(
    model_name: str,
    block_size: int,
    reports: Sequence[LevelReport],
    prompt_tokens: Mapping[int, int],
) -> Iterator[Metric]:
    """Metrics of this moment. `prompt_tokens`: of each rank, computed and cached."""
    yield from _listed(_BY_LEVEL, "level", model_name, reports)
    yield from _listed(_BY_POOL, "pool", model_name, [each for each in reports if each.pool])
    ranks: dict[int, dict[CacheLevel, TierTraffic]] = {each: {} for each in prompt_tokens}
    for report in reports:
        if report.traffic is not None:
            ranks[report.dp_rank][report.level] = report.traffic
    for summary in _OF_RANK:
        read = {dp_rank: summary.read(tiers) for dp_rank, tiers in ranks.items()}
        yield _of_ranks(UnknownMetricFamily, summary.name, summary.text, model_name, read)
    matched = {
        dp_rank: block_size * sum(each.loaded_blocks for each in tiers.values())
        for dp_rank, tiers in ranks.items()
    }
    text = "Prompt tokens that came from tiers"
    yield _of_ranks(UnknownMetricFamily, "matched_tokens", text, model_name, matched)
    for level, name in _HIT_RATES.items():
        read = {
            dp_rank: block_size * tiers[level].loaded_blocks / max(prompt_tokens[dp_rank], 1)
            for dp_rank, tiers in ranks.items()
            if level in tiers
        }
        text = f"Share of prompt tokens that came from {level}"
        yield _of_ranks(GaugeMetricFamily, f"{name}_cache_hit_rate", text, model_name, read)


def _listed(
    readings: Sequence[_Reading], label: str, model_name: str, reports: Sequence[LevelReport]
) -> Iterator[Metric]:
    for reading in readings:
        metric = reading.family(reading.name, reading.text, labels=("model_name", "dp_rank", label))
        for report in reports:
            value = reading.read(report)
            if value is not None:
                metric.add_metric((model_name, str(report.dp_rank), report.level), value)
        yield metric


def _of_ranks(
    family: Family, name: str, text: str, model_name: str, values: Mapping[int, float]
) -> Metric:
    metric = family(f"kvbm_{name}", text, labels=("model_name", "dp_rank"))
    for dp_rank, value in values.items():
        metric.add_metric((model_name, str(dp_rank)), value)
    return metric

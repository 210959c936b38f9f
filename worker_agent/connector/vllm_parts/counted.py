"""What the two halves count, in the shape in which vLLM collects it: increases, and what is now."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

if TYPE_CHECKING:
    from worker_agent.connector.counters import WorkerCounters
    from worker_agent.connector.vllm_parts.scheduler_side import SchedulerSide
    from worker_agent.tiers.level import TierStatus

Values: TypeAlias = dict[str, dict[str, float]]
"""By metric, and by the tier that it is about; "" where it is about none."""

NO_TIER = ""


class Metric(Struct, frozen=True):
    """One of what is counted. A gauge is what there is now, not an increase."""

    name: str
    documentation: str
    by_tier: bool = False
    is_gauge: bool = False


METRICS = (
    Metric("matched_tokens", "Prompt tokens that were to be loaded"),
    Metric("leader_refused", "Calls about unknown requests, or out of order"),
    Metric("failed_blocks", "Blocks that were to be loaded, and were not"),
    Metric("unsaved_blocks", "Blocks that were to be stored, and were not"),
    Metric("stray_completions", "Answers about unknown transfers"),
    Metric("lost_transfers", "Transfers that were not answered before the deadline"),
    Metric("late_looks", "Questions about the shared store that were not answered in time"),
    Metric("released_blocks", "Blocks of the engine that came out of quarantine"),
    Metric(
        "quarantined_blocks", "Blocks of the engine that a lost transfer may touch", is_gauge=True
    ),
    Metric("worker_refused", "Operations of unknown requests, or of invalid blocks"),
    Metric("unknown_finished", "Unknown requests that ended"),
    Metric("voided", "Transfers given up because their blocks went to others"),
    Metric("cancelled_stores", "Stores given up because a load of their step failed"),
    Metric("failed_loads", "Blocks that a worker could not load"),
    Metric("given_up_loads", "Loads that the scheduler's half took back"),
    Metric("stored_blocks", "Blocks stored in a tier", by_tier=True),
    Metric("stored_bytes", "Bytes stored in a tier", by_tier=True),
    Metric("store_seconds", "Seconds that a tier spent on storing", by_tier=True),
    Metric("failed_stores", "Blocks that a tier did not store", by_tier=True),
    Metric("loaded_blocks", "Blocks loaded from a tier", by_tier=True),
    Metric("loaded_bytes", "Bytes loaded from a tier", by_tier=True),
    Metric("load_seconds", "Seconds that a tier spent on loading", by_tier=True),
    Metric("dropped_blocks", "Blocks that waited for a tier, and gave way", by_tier=True),
    Metric("corrupt_blocks", "Blocks whose bytes were not those stored", by_tier=True),
    Metric("held_blocks", "Blocks in a tier of the first worker", by_tier=True, is_gauge=True),
    Metric("waiting_blocks", "Blocks that wait for a tier there", by_tier=True, is_gauge=True),
)

_GAUGES = frozenset(metric.name for metric in METRICS if metric.is_gauge)


class Told:
    """What was told of these counts, so that only increases are told again."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: Values = {}

    def increases(self, values: Values) -> Values:
        """What was added since the last call, and gauges that changed; nothing else."""
        before, self._before = self._before, values
        found: Values = {}
        for name, by_tier in values.items():
            for tier, value in by_tier.items():
                last = before.get(name, {}).get(tier, 0)
                if value != last:
                    told = value if name in _GAUGES else value - last
                    found.setdefault(name, {})[tier] = told
        return found


def together(first: Values, second: Values) -> Values:
    """The increases of both; of gauges, the second's."""
    result = {name: dict(by_tier) for name, by_tier in first.items()}
    for name, by_tier in second.items():
        into = result.setdefault(name, {})
        for tier, value in by_tier.items():
            into[tier] = value if name in _GAUGES else into.get(tier, 0) + value
    return result


def of_scheduler(side: "SchedulerSide") -> Values:
    """What the scheduler's half has counted since it was made."""
    counters = asdict(side.leader.counters)
    counters["leader_refused"] = counters.pop("refused")
    counters["late_looks"] = side.late_looks
    counters["released_blocks"] = side.slots.quarantine.released_blocks
    counters["quarantined_blocks"] = side.leader.quarantined_blocks
    return _of_no_tier(counters)


def of_worker(
    counters: "WorkerCounters", given_up: int, tiers: "Sequence[TierStatus]", *, is_first: bool
) -> Values:
    """What a worker has counted since it was made. `is_first`: of several, it tells what is now."""
    counted = asdict(counters)
    del counted["saved_layers"]  # vLLM's layers are not stored one by one
    counted["worker_refused"] = counted.pop("refused")
    counted["given_up_loads"] = given_up
    values = _of_no_tier(counted)
    for status in tiers:
        for name, value in _of_tier(status).items():
            if is_first or name not in _GAUGES:
                values.setdefault(name, {})[status.tier.name.lower()] = value
    return values


def _of_tier(status: "TierStatus") -> Mapping[str, float]:
    return {
        "stored_blocks": status.down.blocks,
        "stored_bytes": status.down.bytes,
        "store_seconds": status.down.seconds,
        "failed_stores": status.down.failed,
        "loaded_blocks": status.up.blocks,
        "loaded_bytes": status.up.bytes,
        "load_seconds": status.up.seconds,
        "dropped_blocks": status.dropped_blocks,
        "corrupt_blocks": status.store.corrupt,
        "held_blocks": status.held_blocks,
        "waiting_blocks": status.waiting_blocks,
    }


def _of_no_tier(counted: Mapping[str, float]) -> Values:
    return {name: {NO_TIER: value} for name, value in counted.items()}

"""Counters of both halves in the form that vLLM collects: increases, and present values."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

if TYPE_CHECKING:
    from worker_agent.connector.slots.rank_reports import LeaderCounters, WorkerCounters
    from worker_agent.connector.tier_publisher import TierPublisher
    from worker_agent.connector.vllm_parts.peer_sharing import PeerCounts
    from worker_agent.tiers.level import TierStatus

Values: TypeAlias = dict[str, dict[str, float]]
"""Values by metric, then by tier; the tier is "" if the metric has none."""

NO_TIER = ""


class Metric(Struct, frozen=True):
    """A metric of the connector. A gauge is a present value, not an increase."""

    name: str
    documentation: str
    by_tier: bool = False
    is_gauge: bool = False


METRICS = (
    Metric("matched_tokens", "Prompt tokens found in lower tiers and scheduled to be loaded"),
    Metric("leader_refused", "Calls about unknown requests, or out of order"),
    Metric("failed_blocks", "Blocks that should have been loaded and were not"),
    Metric("unsaved_blocks", "Blocks that should have been stored and were not"),
    Metric("stray_completions", "Completions of unknown transfers"),
    Metric("lost_transfers", "Transfers not completed before the deadline"),
    Metric("late_looks", "Lookups in the shared store or at peers that did not end in time"),
    Metric("released_blocks", "Blocks of the engine released from quarantine"),
    Metric(
        "quarantined_blocks", "Blocks of the engine that a lost transfer may access", is_gauge=True
    ),
    Metric("worker_refused", "Operations of unknown requests, or of invalid blocks"),
    Metric("unknown_finished", "Finished requests that the worker does not know"),
    Metric("voided", "Transfers given up because the engine reuses their blocks"),
    Metric("cancelled_stores", "Stores cancelled because a load of their step failed"),
    Metric("failed_loads", "Blocks that a worker could not load"),
    Metric("given_up_loads", "Loads withdrawn by the scheduler half"),
    Metric("dropped_readers", "Readers of tier events that were too slow or too many"),
    Metric("not_accepted", "Connections for tier events that failed before they were served"),
    Metric("pulled_blocks", "Blocks loaded from other engines"),
    Metric("pulled_bytes", "Bytes loaded from other engines"),
    Metric("pull_seconds", "Seconds spent on loading from other engines"),
    Metric("failed_pulls", "Loads from other engines that ended in a damaged or missing block"),
    Metric("unanswered_looks", "Lookups that another engine refused, or did not answer in time"),
    Metric("given_blocks", "Blocks sent to other engines"),
    Metric("mapped_blocks", "Those of them that were read from shared memory"),
    Metric("nixl_given_blocks", "Those of them that were read from memory through NIXL"),
    Metric("nixl_pulled_blocks", "Blocks read from memory of other engines through NIXL"),
    Metric("nixl_failed_reads", "Requests that NIXL could not read, and the socket did"),
    Metric("refused_peers", "Connections and requests of other engines that were refused"),
    Metric("broken_peers", "Connections of other engines that ended unexpectedly"),
    Metric("stored_blocks", "Blocks stored in a tier", by_tier=True),
    Metric("stored_bytes", "Bytes stored in a tier", by_tier=True),
    Metric("store_seconds", "Seconds that a tier spent on storing", by_tier=True),
    Metric("failed_stores", "Blocks that a tier did not store", by_tier=True),
    Metric("loaded_blocks", "Blocks loaded from a tier", by_tier=True),
    Metric("loaded_bytes", "Bytes loaded from a tier", by_tier=True),
    Metric("load_seconds", "Seconds that a tier spent on loading", by_tier=True),
    Metric("dropped_blocks", "Waiting blocks dropped from the queue of a tier", by_tier=True),
    Metric("corrupt_blocks", "Blocks with bytes that differ from those stored", by_tier=True),
    Metric("held_blocks", "Blocks in a tier of the first worker", by_tier=True, is_gauge=True),
    Metric(
        "waiting_blocks", "Blocks waiting for a tier of that worker", by_tier=True, is_gauge=True
    ),
)

_GAUGES = frozenset(metric.name for metric in METRICS if metric.is_gauge)


class ReportedCounts:
    """The values at the last call, from which increases are computed."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: Values = {}

    def increases(self, values: Values) -> Values:
        """Return the increases since the last call, and the gauges that changed."""
        before, self._before = self._before, values
        found: Values = {}
        for name, by_tier in values.items():
            for tier, value in by_tier.items():
                last = before.get(name, {}).get(tier, 0)
                if value != last:
                    reported = value if name in _GAUGES else value - last
                    found.setdefault(name, {})[tier] = reported
        return found


def together(first: Values, second: Values) -> Values:
    """Return the sums of both; of gauges, the second's values."""
    result = {name: dict(by_tier) for name, by_tier in first.items()}
    for name, by_tier in second.items():
        into = result.setdefault(name, {})
        for tier, value in by_tier.items():
            into[tier] = value if name in _GAUGES else into.get(tier, 0) + value
    return result


def of_scheduler(
    leader: "LeaderCounters", late_looks: int, released_blocks: int, quarantined_blocks: int
) -> Values:
    """Return the counters of the scheduler's half since its creation."""
    counters = asdict(leader)
    counters["leader_refused"] = counters.pop("refused")
    counters["late_looks"] = late_looks
    counters["released_blocks"] = released_blocks
    counters["quarantined_blocks"] = quarantined_blocks
    return _of_no_tier(counters)


def of_worker(
    counters: "WorkerCounters",
    given_up: int,
    events: "TierPublisher | None",
    tiers: "Sequence[TierStatus]",
    peers: "PeerCounts",
    *,
    is_first: bool,
) -> Values:
    """Return a worker's counters since its creation. `is_first`: it also returns the gauges."""
    counted = asdict(counters)
    del counted["saved_layers"]  # vLLM's blocks are not stored by layer.
    counted["worker_refused"] = counted.pop("refused")
    counted["given_up_loads"] = given_up
    counted["dropped_readers"] = 0 if events is None else events.dropped_readers
    counted["not_accepted"] = 0 if events is None else events.not_accepted
    values = _of_no_tier(counted | _of_peers(peers))
    for status in tiers:
        for name, value in _of_tier(status).items():
            if is_first or name not in _GAUGES:
                values.setdefault(name, {})[status.tier.name.lower()] = value
    return values


def _of_peers(peers: "PeerCounts") -> dict[str, float]:
    return {
        "pulled_blocks": peers.pulled.blocks,
        "pulled_bytes": peers.pulled.bytes,
        "pull_seconds": peers.pulled.seconds,
        "failed_pulls": peers.pulled.failed,
        "unanswered_looks": peers.unanswered,
        "given_blocks": peers.given.sent_blocks,
        "mapped_blocks": peers.given.mapped_blocks,
        "nixl_given_blocks": peers.given.read_blocks,
        "nixl_pulled_blocks": peers.nixl.read_blocks,
        "nixl_failed_reads": peers.nixl.failed_reads,
        "refused_peers": peers.given.refused,
        "broken_peers": peers.given.broken,
    }


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

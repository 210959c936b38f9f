"""What an agent beside an engine tells Prometheus."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.publisher.follower_metrics import FollowerCollector
from worker_agent.bridged_rank import BridgedRank
from worker_agent.metrics import BUS_READINGS, RankCollector, Reading
from worker_agent.metrics_poll import MetricsPoll

_READINGS: tuple[Reading[BridgedRank], ...] = (
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_load_reports",
        "Reports of the engine's load, from its load socket or its metrics",
        lambda rank: rank.follower.engine_loads.reports,
    ),
    *BUS_READINGS,
)

_TIER_READINGS: tuple[Reading[BridgedRank], ...] = (
    Reading(
        GaugeMetricFamily,
        "kv_agent_tiers_known",
        "Whether it is known what the block manager in the engine holds",
        lambda rank: float(rank.tiers is not None and rank.tiers.is_current),
    ),
    Reading(
        GaugeMetricFamily,
        "kv_agent_tiers_held_blocks",
        "Blocks in the tiers of the block manager in the engine, once per tier",
        lambda rank: 0 if rank.tiers is None else rank.tiers.held_blocks,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_tiers_messages",
        "Messages from the block manager in the engine",
        lambda rank: 0 if rank.tiers is None else rank.tiers.messages,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_tiers_snapshots",
        "How often the block manager in the engine reported everything it holds",
        lambda rank: 0 if rank.tiers is None else rank.tiers.snapshots,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_tiers_failures",
        "Connections to the block manager in the engine that failed",
        lambda rank: 0 if rank.tiers is None else rank.tiers.failures,
    ),
)


class BridgeCollector(RankCollector[BridgedRank]):
    """Every rank, and the reading of the engine's own metrics."""

    def __init__(
        self,
        read_model_name: Callable[[], str],
        read_ranks: Callable[[], Sequence[BridgedRank]],
        poll: MetricsPoll | None,
    ) -> None:
        self._poll = poll
        super().__init__(read_model_name, (*_READINGS, *_TIER_READINGS), read_ranks)
        self.registry.register(FollowerCollector(lambda: [r.follower for r in read_ranks()]))

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment."""
        yield from super().collect()
        if self._poll is not None:
            yield CounterMetricFamily(
                "kv_agent_metrics_readings",
                "Readings of the engine's metrics",
                self._poll.readings,
            )
            yield CounterMetricFamily(
                "kv_agent_metrics_failures",
                "Readings of the engine's metrics that failed",
                self._poll.failures,
            )
            yield GaugeMetricFamily(
                "kv_agent_metrics_readable",
                "Whether the engine's metrics could be read the last time",
                float(self._poll.problem is None),
            )

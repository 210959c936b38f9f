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


class BridgeCollector(RankCollector[BridgedRank]):
    """Every rank, and the reading of the engine's own metrics."""

    def __init__(
        self,
        read_model_name: Callable[[], str],
        read_ranks: Callable[[], Sequence[BridgedRank]],
        poll: MetricsPoll | None,
    ) -> None:
        self._poll = poll
        super().__init__(read_model_name, _READINGS, read_ranks)
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

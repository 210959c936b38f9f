"""What an agent beside an engine tells Prometheus."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker_agent.bridged_rank import BridgedRank
from worker_agent.metrics import BUS_READINGS, RankCollector, Reading
from worker_agent.metrics_poll import MetricsPoll

_READINGS: tuple[Reading[BridgedRank], ...] = (
    Reading(
        GaugeMetricFamily,
        "kv_agent_engine_waiting_seconds",
        "For how long anything that the engine published may have been missing",
        lambda rank: rank.waiting_s,
    ),
    Reading(
        GaugeMetricFamily,
        "kv_agent_engine_connected",
        "Whether there is a connection to the engine's events",
        lambda rank: rank.is_connected,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_connections",
        "Connections made to the engine's events",
        lambda rank: rank.follower.source.connections,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_failed_connections",
        "Connections to the engine's events that could not be made",
        lambda rank: rank.follower.source.failed_connections,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_batches",
        "Batches of events carried out",
        lambda rank: rank.follower.feed.counters.applied,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_batches_unreadable",
        "Batches that were none",
        lambda rank: rank.follower.feed.counters.unreadable,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_batches_foreign",
        "Batches of another rank, dropped",
        lambda rank: rank.follower.feed.counters.foreign,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_messages_garbage",
        "Messages that were no batch at all",
        lambda rank: rank.follower.source.garbage,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_events_dropped",
        "Events of unknown type, or malformed",
        lambda rank: rank.follower.feed.counters.dropped_events,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_losses",
        "Gaps in the engine's batches that no replay filled",
        lambda rank: rank.follower.feed.counters.lost,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_lives",
        "New lives of the engine's cache",
        lambda rank: rank.follower.feed.counters.new_lives,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_replays",
        "Replays asked for",
        lambda rank: rank.follower.log_counters.replays,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_engine_replay_failures",
        "Replays that failed",
        lambda rank: rank.follower.log_counters.replay_failures,
    ),
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

"""What an agent of any kind tells Prometheus about its ranks: a table of readings."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_agent.presence import RankOnBus

R = TypeVar("R", bound=RankOnBus)
R_contra = TypeVar("R_contra", bound=RankOnBus, contravariant=True)
_LABELS = ("model_name", "dp_rank")


class Reading(Struct, Generic[R_contra], frozen=True):
    """One metric, and how it is read off a rank."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    read: Callable[[R_contra], float]


BUS_READINGS: tuple[Reading[RankOnBus], ...] = (
    Reading(
        CounterMetricFamily,
        "kv_agent_publish_failures",
        "Event messages that the bus did not take",
        lambda rank: rank.events.failures,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_publish_refusals",
        "Event messages that found the stream full",
        lambda rank: rank.events.refusals,
    ),
    Reading(
        GaugeMetricFamily,
        "kv_agent_publish_waiting_seconds",
        "For how long the oldest change has waited that the log does not have yet",
        lambda rank: rank.events.waiting_s,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_load_reports_missed",
        "Load reports that could not be sent",
        lambda rank: rank.loads.missed,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_queries_answered",
        "Questions about events and load that were answered",
        lambda rank: rank.answers.answered,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_queries_refused",
        "Questions that were malformed, or came while too many waited",
        lambda rank: rank.answers.refused,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_answers_undelivered",
        "Answers that the bus did not take",
        lambda rank: rank.answers.undelivered,
    ),
)


class RankCollector(Collector, Generic[R]):
    """Reads every rank when Prometheus asks; `registry` is its own."""

    def __init__(
        self,
        read_model_name: Callable[[], str],
        readings: Sequence[Reading[R]],
        read_ranks: Callable[[], Sequence[R]],
    ) -> None:
        self.registry = CollectorRegistry()
        self._read_model_name = read_model_name
        self._readings = readings
        self._read_ranks = read_ranks
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment, one sample a rank."""
        model_name = self._read_model_name()
        for reading in self._readings:
            metric = reading.family(reading.name, reading.text, labels=_LABELS)
            for rank in self._read_ranks():
                metric.add_metric((model_name, str(rank.rank.dp_rank)), reading.read(rank))
            yield metric

"""What an agent tells Prometheus of the blocks that it gives other workers, and has of theirs."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker_agent.agent_sharing import AgentSharing
from worker_agent.sharing import BlockSharing

Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]
_LABELS = ("model_name", "dp_rank")


class _Reading(Struct, frozen=True):
    """One metric of every rank."""

    family: Family
    name: str
    text: str
    read: Callable[[BlockSharing], float]


def _count(name: str, text: str, read: Callable[[BlockSharing], float]) -> _Reading:
    return _Reading(CounterMetricFamily, name, text, read)


_READINGS: tuple[_Reading, ...] = (
    _count("pulled_blocks", "Blocks had from other workers", lambda s: s.pulled.blocks),
    _count("pulled_bytes", "The same in bytes", lambda s: s.pulled.bytes),
    _count("pull_seconds", "Time spent having them", lambda s: s.pulled.seconds),
    _count("pull_failures", "Times that a worker did not give blocks that it was expected to have",
           lambda s: s.pulled.failed),
    _count("given_blocks", "Blocks given to other workers", lambda s: s.counters.sent_blocks),
    _count("mapped_blocks", "Of those, read where they lie", lambda s: s.counters.mapped_blocks),
    _count("taken_blocks", "Blocks that others wrote", lambda s: s.counters.received_blocks),
    _count("corrupt_blocks", "Blocks that came damaged", lambda s: s.counters.corrupt_blocks),
    _count("refused", "Requests and connections of others that were refused",
           lambda s: s.counters.refused),
    _count("broken", "Connections of others that ended in the middle",
           lambda s: s.counters.broken),
    _Reading(GaugeMetricFamily, "connections", "Other workers connected",
             lambda s: s.connections),
    _Reading(GaugeMetricFamily, "connections_max", "As many may be",
             lambda s: s.max_connections),
)  # fmt: skip


def sharing_metrics(model_name: str, sharing: AgentSharing) -> Iterator[Metric]:
    """Metrics of this moment."""
    for reading in _READINGS:
        metric = reading.family(f"kv_agent_share_{reading.name}", reading.text, labels=_LABELS)
        for rank, each in sharing.ranks.items():
            metric.add_metric((model_name, str(rank.dp_rank)), reading.read(each))
        yield metric

"""What a follower of a Dynamo fleet counts, read when Prometheus asks."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import asdict
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dynamo.follower import DynamoFollower
from router.metrics import RouterMetrics

_PREFIX = "kv_router_dynamo"


class DynamoCollector(Collector):
    """Gauges and totals of one follower."""

    def __init__(self, follower: DynamoFollower, metrics: RouterMetrics) -> None:
        self._follower = follower
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment. O(ranks)."""
        fleet = self._follower.fleet
        yield _gauge("connected", "1 while connected to Dynamo's NATS", self._follower.is_connected)
        yield _gauge("workers", "Workers of Dynamo's that are known", len(fleet))
        messages = CounterMetricFamily(
            f"{_PREFIX}_messages", "Messages heard, by outcome", labels=("topic", "outcome")
        )
        for labels, count in sorted(self._follower.heard.items()):
            messages.add_metric(labels, count)
        yield messages
        yield _totals("rank", "What became of events and blocks", fleet.rank_counts())
        yield _totals("fleet", "What became of loads and ranks", fleet.counts)
        incumbents = self._follower.incumbents
        if incumbents is not None:
            yield _totals("requests", "What became of their routers' words", incumbents.counts)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def _totals(name: str, text: str, counts: Struct) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("what",))
    for what, count in asdict(counts).items():
        family.add_metric((what,), count)
    return family

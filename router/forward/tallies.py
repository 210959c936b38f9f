"""What every request counts: numbers and times, made Prometheus's when it asks.

Its own objects take a lock for each; there is one thread here, and a dozen of them in each request.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter. With labels it has a number for each."""

    __slots__ = ("_labels", "_name", "_text", "counts")

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.counts: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        registry.register(self)

    def count(self, *labels: str, by: float = 1) -> None:
        """Count one more."""
        self.counts[labels] = self.counts.get(labels, 0) + by

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family


class Times(Collector):
    """A histogram of seconds."""

    __slots__ = ("_bounds_s", "_counts", "_name", "_sum_s", "_text")

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds_s: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def note(self, time_s: float) -> None:
        """It took so long, once."""
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self._sum_s += time_s

    def collect(self) -> Iterator[Metric]:
        """The histogram of this moment."""
        family = HistogramMetricFamily(self._name, self._text)
        names = [*map(floatToGoString, self._bounds_s), "+Inf"]
        running, buckets = 0, []
        for name, count in zip(names, self._counts, strict=True):
            running += count
            buckets.append((name, running))
        family.add_metric((), buckets, self._sum_s)
        yield family

"""What watching costs, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dashboard.decision_feed import DecisionFeed
from router.dashboard.streams import Streams


class DashboardCollector(Collector):
    """Read off the streams when Prometheus asks."""

    def __init__(self, streams: Streams, feed: DecisionFeed) -> None:
        self._streams = streams
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        streams = self._streams
        yield _gauge("streams", "Dashboards that watch", len(streams))
        yield _gauge("streams_max", "How many may", streams.most)
        yield _counter("frames", "Frames given to dashboards", streams.frames)
        yield _counter("frame_bytes", "Bytes of these", streams.frame_bytes)
        missed = "Frames that slow dashboards missed; they get everything anew"
        yield _counter("missed_frames", missed, streams.missed)
        seconds = "Processor's time of making frames; at most 2 % of a processor"
        yield _counter("seconds", seconds, streams.spent_s)
        yield _counter("shown_decisions", "Decisions that were shown", self._feed.number)
        skipped = "Decisions not shown while somebody watched"
        yield _counter("skipped_decisions", skipped, self._feed.skipped)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_router_dashboard_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kv_router_dashboard_{name}", text, value=value)

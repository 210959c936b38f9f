"""What followers count, for Prometheus: the same in routers and agents."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import asdict
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.publisher.pull_follower import Follower

_LABELS = ("worker_id", "dp_rank")
_Labels: TypeAlias = tuple[str, str]

_SOURCE = {
    "messages": "Messages received live",
    "garbage": "Messages that were no batch at all",
    "connections": "Connections made to an engine's events",
    "failed_connections": "Connections to an engine's events that could not be made",
}
_FEED = {
    "applied": "Batches carried out",
    "unreadable": "Batches that were none",
    "foreign": "Batches of another rank, dropped",
    "dropped_events": "Events of unknown type, or malformed, dropped",
    "new_lives": "New lives of an engine's cache",
    "lost": "Gaps in an engine's batches that no replay filled",
}
_LOG = {
    "replays": "Replays asked for, probes of idle engines included",
    "replay_failures": "Replays that failed",
    "duplicates": "Batches that came once more",
    "stale": "Live batches of a former life",
    "held_overflows": "Live batches dropped for want of room, and replayed",
}
_KEPT = {
    "known_blocks": "Blocks whose names are known, held or not",
    "orphan_blocks": "Blocks that cannot be named, as their parents are unknown",
    "waiting_blocks": "Blocks that wait for their parents",
}


class FollowerCollector(Collector):
    """Reads followers off whoever owns them, when Prometheus asks. O(followers)."""

    def __init__(
        self,
        read_followers: Callable[[], Iterable[Follower]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_followers = read_followers
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment."""
        followers = [(_labels(follower), follower) for follower in self._read_followers()]
        yield from _counters(_SOURCE, [(names, f.source) for names, f in followers])
        yield from _counters(_FEED, [(names, f.feed.counters) for names, f in followers])
        yield from _counters(_LOG, [(names, f.log_counters) for names, f in followers])
        yield from self._conditions(followers)
        yield from _normalized(followers)

    def _conditions(
        self, followers: Sequence[tuple[_Labels, Follower]]
    ) -> Iterator[GaugeMetricFamily]:
        now_s = self._clock()
        waiting = _gauge("waiting_seconds", "For how long anything published may be missing")
        condition = GaugeMetricFamily(
            "kv_engine_condition",
            "1 for the condition a rank is in",
            labels=(*_LABELS, "condition"),
        )
        for names, follower in followers:
            waiting.add_metric(names, follower.waiting_s(now_s))
            condition.add_metric((*names, follower.status(now_s).condition), 1)
        yield from (waiting, condition)


def _counters(
    texts: dict[str, str], readings: Sequence[tuple[_Labels, object]]
) -> Iterator[CounterMetricFamily]:
    for name, text in texts.items():
        family = CounterMetricFamily(f"kv_engine_{name}", text, labels=_LABELS)
        for names, counters in readings:
            family.add_metric(names, getattr(counters, name))
        yield family


def _normalized(
    followers: Sequence[tuple[_Labels, Follower]],
) -> Iterator[Metric]:
    """What never happened is left out: most never does, and there are many ranks."""
    outcomes = CounterMetricFamily(
        "kv_engine_normalized",
        "Blocks (or events, where the outcome says so), by outcome",
        labels=(*_LABELS, "outcome"),
    )
    kept = {name: _gauge(name, text) for name, text in _KEPT.items()}
    for names, follower in followers:
        stats = follower.feed.normalizer_stats
        for outcome, count in asdict(stats.counts).items():
            if count:
                outcomes.add_metric((*names, outcome), count)
        for name, gauge in kept.items():
            gauge.add_metric(names, getattr(stats, name))
    yield from (outcomes, *kept.values())


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_engine_{name}", text, labels=_LABELS)


def _labels(follower: Follower) -> _Labels:
    return str(follower.rank.worker_id), str(follower.rank.dp_rank)

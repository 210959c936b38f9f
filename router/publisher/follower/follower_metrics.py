"""Metrics of followers, the same in routers and agents."""

import time
from collections.abc import Callable, Iterable

from msgspec.structs import asdict, astuple
from prometheus_client import CollectorRegistry

from router.publisher.follower.pull_follower import Follower
from router.runtime.process.metrics import Rows, counter, expose_each, gauge

_METRICS: Rows = {
    "messages": counter("Messages received live", "source."),
    "garbage": counter("Messages that are not batches", "source."),
    "connections": counter("Connections made to an engine's events", "source."),
    "failed_connections": counter(
        "Connections to an engine's events that could not be made", "source."
    ),
    "overflows": counter(
        "Connections dropped because 64 MiB of messages waited; a replay follows", "source."
    ),
    "applied": counter("Batches applied", "feed.counters."),
    "unreadable": counter("Batches that could not be read", "feed.counters."),
    "foreign": counter("Batches of another rank, dropped", "feed.counters."),
    "dropped_events": counter("Events dropped: of unknown type, or malformed", "feed.counters."),
    "new_lives": counter("New lives of an engine's cache", "feed.counters."),
    "lost": counter("Gaps in an engine's batches that no replay filled", "feed.counters."),
    "replays": counter("Replays requested, probes of idle engines included", "log_counters."),
    "replay_failures": counter("Replays that failed", "log_counters."),
    "duplicates": counter("Batches received more than once", "log_counters."),
    "stale": counter("Live batches of a former life", "log_counters."),
    "held_overflows": counter(
        "Live batches dropped because the buffer was full, and replayed", "log_counters."
    ),
    "normalized": counter(
        "Blocks by outcome; events for *_events and untold_contexts",
        lambda follower: {
            outcome: count
            for outcome, count in asdict(follower.feed.normalizer_stats.counts).items()
            if count
        },
        "outcome",
    ),
    "known_blocks": gauge(
        "Blocks with a known sequence hash, held or not", "feed.normalizer_stats."
    ),
    "orphan_blocks": gauge(
        "Held blocks without a sequence hash, because their parents are unknown",
        "feed.normalizer_stats.",
    ),
    "waiting_blocks": gauge("Blocks waiting for their parents", "feed.normalizer_stats."),
    "waiting_seconds": gauge(
        "For how long published events may be missing", lambda f: f.waiting_s(time.monotonic())
    ),
    "condition": gauge(
        "1 for the current condition of a rank",
        lambda follower: {follower.status(time.monotonic()).condition: 1},
        "condition",
    ),
}


def expose_followers(
    registry: CollectorRegistry, read_followers: Callable[[], Iterable[Follower]]
) -> None:
    """Add the metrics of the current followers, read at each scrape. O(followers)."""
    expose_each(
        registry,
        "kv_engine_",
        _METRICS,
        ("worker_id", "dp_rank"),
        lambda: ((astuple(each.rank), each) for each in read_followers()),
    )

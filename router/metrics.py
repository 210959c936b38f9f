"""What a router counts, for Prometheus: one registry per process, its counters by subject.

What can be read off the core when Prometheus asks is in `state_metrics.py`.
"""

from collections import Counter as Counts
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.decision_metrics import DecisionMetrics
from router.protocol.replicas import PromptUsage

_WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SNAPSHOT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class RouterMetrics:
    """Counters and histograms that adapters feed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make = Maker(self.registry)
        self.requests = RequestCounts(self.registry)
        self.refusals = make.counter("refusals", "Requests refused", "interface", "code")
        self.unknown_fields = make.counter(
            "unknown_fields", "Unknown fields in request bodies", "interface", "route"
        )
        self.decisions = DecisionMetrics(self.registry)
        self.usage = UsageMetrics(make)
        self.waiting = WaitingMetrics(make)
        self.sessions = SessionMetrics(make)
        self.events = EventMetrics(make)
        self.bus = BusMetrics(make)
        self.snapshots = SnapshotMetrics(make)

    def exposition(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self.registry)


class RequestCounts(Collector):
    """Requests answered; to count one takes a tenth of what a Counter takes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: Counts[tuple[str, str, str | int]] = Counts()
        registry.register(self)

    def count(self, interface: str, route: str, code: str | int) -> None:
        """One more."""
        self._counts[interface, route, code] += 1

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        labels = ("interface", "route", "code")
        family = CounterMetricFamily("kv_router_requests", "Requests answered", labels=labels)
        for (interface, route, code), count in self._counts.items():
            family.add_metric((interface, route, str(code)), count)
        yield family


class Maker:
    """Makes metrics of a registry, all named `kv_router_…`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter; Prometheus adds `_total` to its name."""
        return Counter(f"kv_router_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge."""
        return Gauge(f"kv_router_{name}", text, labels, registry=self._registry)

    def seconds(self, name: str, text: str, buckets_s: Sequence[float], label: str) -> Histogram:
        """A histogram of times, by one label."""
        registry = self._registry
        return Histogram(f"kv_router_{name}", text, (label,), buckets=buckets_s, registry=registry)


class UsageMetrics:
    """What engines said of prompts, against what was expected of them; weighted by tokens."""

    def __init__(self, make: Maker) -> None:
        self.prompt_tokens = make.counter(
            "usage_prompt_tokens", "Prompt tokens of requests whose usage was reported"
        )
        self.cached_tokens = make.counter(
            "usage_cached_tokens", "Of those, tokens that their engines had cached"
        )
        self.predicted_tokens = make.counter(
            "usage_predicted_cached_tokens", "Of those, tokens that we had predicted to be cached"
        )
        self.mispredicted_tokens = make.counter(
            "usage_mispredicted_tokens", "Tokens by which the two differ, request by request"
        )

    def note(self, usage: PromptUsage, predicted_tokens: int) -> None:
        """A usage was reported, where so much had been expected to be cached."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.predicted_tokens.inc(predicted_tokens)
        self.mispredicted_tokens.inc(abs(predicted_tokens - usage.cached_tokens))


class WaitingMetrics:
    """Requests that wait in the router."""

    def __init__(self, make: Maker) -> None:
        self.seconds = make.seconds(
            "wait_seconds",
            "Time in the queue of requests that had to wait and were placed",
            _WAIT_BUCKETS_S,
            "policy_class",
        )
        self.withdrawn = make.counter(
            "withdrawn", "Requests whose callers hung up while they waited"
        )


class SessionMetrics:
    """Sessions that several routers share."""

    def __init__(self, make: Maker) -> None:
        self.store_failures = make.counter(
            "session_store_failures", "Times that Redis did not answer about a session", "operation"
        )
        self.moved = make.counter(
            "sessions_moved", "Requests placed again where another router had bound their session"
        )


class EventMetrics:
    """What workers say, and what becomes of them."""

    def __init__(self, make: Maker) -> None:
        self.log_messages = make.counter("log_messages", "Messages of the event log", "outcome")
        self.load_reports = make.counter("load_reports", "Load reports", "outcome")
        self.announcements = make.counter("announcements", "Registry entries read", "outcome")
        self.checkpoints_requested = make.counter(
            "checkpoints_requested", "Checkpoints asked of agents", "reason"
        )
        self.workers_gone = make.counter("workers_gone", "Workers taken out", "reason")
        self.reservations_dropped = make.counter(
            "reservations_dropped", "Reservations that ended without being freed", "reason"
        )
        self.follower_failures = make.counter(
            "follower_failures", "Followers of engines that failed, and began anew"
        )


class BusMetrics:
    """The connection to NATS, and what is sent over it."""

    def __init__(self, make: Maker) -> None:
        self.requests = make.gauge(
            "bus_requests", "Requests from the bus being answered", "queue_group"
        )
        self.requests_max = make.gauge(
            "bus_requests_max", "How many may be; more are refused", "queue_group"
        )
        self.losses = make.counter("bus_losses", "Times the connection to NATS was lost")
        self.stream_reopens = make.counter(
            "stream_reopens", "Times a stream was opened again after a doubt", "stream"
        )
        self.outbox_overflows = make.counter(
            "outbox_overflows", "Effects dropped because the outbox was full"
        )
        self.outbox_failures = make.counter(
            "outbox_failures", "Effects that the bus did not take", "effect"
        )


class SnapshotMetrics:
    """Snapshots of the index."""

    def __init__(self, make: Maker) -> None:
        self.written = make.counter("snapshots_written", "Snapshots written")
        self.bytes = make.counter("snapshot_bytes", "Bytes of snapshots written")
        self.failures = make.counter("snapshot_failures", "Snapshots that could not be written")
        self.restored = make.counter("snapshots_restored", "Snapshots restored")
        self.restored_blocks = make.counter(
            "snapshot_restored_blocks", "Blocks restored from snapshots, per rank and tier"
        )
        self.unusable = make.counter(
            "snapshots_unusable", "Snapshots passed over at the start", "reason"
        )
        self.seconds = make.seconds(
            "snapshot_seconds",
            "Time of each step of a snapshot: take, write, read, restore",
            _SNAPSHOT_BUCKETS_S,
            "step",
        )

"""The router's Prometheus metrics: one registry per process, and its metrics of events.

Values that are read from the core at scrape time are in `state_metrics.py`.
"""

from typing import Annotated

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.observability.decision_metrics import DECISION_METRICS, DecisionTotals
from router.protocol.replicas import PromptUsage
from router.runtime.process.metrics import Counts, Event, expose, make_metrics

_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_POLL_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_SNAPSHOT_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class RouterMetrics:
    """Metrics that adapters update."""

    requests: Annotated[Counts, Event("Requests answered", ("interface", "route", "code"))]
    refusals: Annotated[Counter, Event("Requests refused", ("interface", "code"))]
    unknown_fields: Annotated[
        Counter, Event("Unknown fields in request bodies", ("interface", "route"))
    ]

    ignored_overrides: Annotated[
        Counter, Event("Requests with an override that has no effect, by its field", ("field",))
    ]

    usage_prompt_tokens: Annotated[Counter, Event("Prompt tokens of requests with a usage report")]
    usage_cached_tokens: Annotated[Counter, Event("Of those, tokens that their engines had cached")]
    usage_predicted_cached_tokens: Annotated[
        Counter, Event("Of those, tokens that the router predicted to be cached")
    ]
    usage_mispredicted_tokens: Annotated[
        Counter, Event("Tokens by which the two differ, request by request")
    ]

    wait_seconds: Annotated[
        Histogram,
        Event(
            "Time in the queue of requests that had to wait and were placed",
            ("policy_class",),
            bounds_s=_WAIT_S,
        ),
    ]
    withdrawn: Annotated[
        Counter, Event("Requests withdrawn: the caller disconnected while they waited")
    ]
    session_store_failures: Annotated[
        Counter, Event("Redis requests about sessions that failed", ("operation",))
    ]
    sessions_moved: Annotated[
        Counter, Event("Requests placed again where another router had bound their session")
    ]

    log_messages: Annotated[Counter, Event("Messages of the event log", ("outcome",))]
    load_reports: Annotated[Counter, Event("Load reports", ("outcome",))]
    announcements: Annotated[Counter, Event("Registry entries read", ("outcome",))]
    checkpoints_requested: Annotated[
        Counter, Event("Checkpoints requested from agents", ("reason",))
    ]
    workers_gone: Annotated[Counter, Event("Workers removed", ("reason",))]
    reservations_dropped: Annotated[
        Counter, Event("Reservations that ended without being freed", ("reason",))
    ]
    engine_polls: Annotated[
        Counter, Event("Reads of the metrics of engines without an agent", ("outcome",))
    ]
    engine_poll_seconds: Annotated[
        Histogram, Event("Time of such a read that succeeded", bounds_s=_POLL_S)
    ]
    follower_failures: Annotated[
        Counter, Event("Followers of engines that failed and were restarted")
    ]

    bus_requests: Annotated[Gauge, Event("Requests from the bus in progress", ("queue_group",))]
    bus_requests_max: Annotated[
        Gauge, Event("Limit of such requests; more are refused", ("queue_group",))
    ]
    bus_losses: Annotated[Counter, Event("Times the connection to NATS was lost")]
    stream_reopens: Annotated[
        Counter, Event("Times a stream was reopened after a gap or an error", ("stream",))
    ]
    outbox_overflows: Annotated[Counter, Event("Effects dropped because the outbox was full")]
    outbox_failures: Annotated[
        Counter, Event("Effects that could not be sent over the bus", ("effect",))
    ]

    snapshots_written: Annotated[Counter, Event("Snapshots written")]
    snapshot_bytes: Annotated[Counter, Event("Bytes of snapshots written")]
    snapshot_failures: Annotated[Counter, Event("Snapshots that could not be written")]
    snapshots_restored: Annotated[Counter, Event("Snapshots restored")]
    snapshot_restored_blocks: Annotated[
        Counter, Event("Blocks restored from snapshots, per rank and tier")
    ]
    snapshots_unusable: Annotated[Counter, Event("Snapshots skipped at the start", ("reason",))]
    snapshot_seconds: Annotated[
        Histogram,
        Event(
            "Time of each step of a snapshot: take, write, read, restore",
            ("step",),
            bounds_s=_SNAPSHOT_S,
        ),
    ]

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make_metrics(self, self.registry, "kv_router_")
        self.decisions = DecisionTotals()
        expose(self.registry, "kv_router_", DECISION_METRICS, self.decisions)

    def note_usage(self, usage: PromptUsage, predicted_tokens: int) -> None:
        """Record a usage report, for which `predicted_tokens` cached tokens were predicted."""
        self.usage_prompt_tokens.inc(usage.prompt_tokens)
        self.usage_cached_tokens.inc(usage.cached_tokens)
        self.usage_predicted_cached_tokens.inc(predicted_tokens)
        self.usage_mispredicted_tokens.inc(abs(predicted_tokens - usage.cached_tokens))

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

"""Prometheus metrics of a forwarder."""

from typing import Annotated, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.runtime.process.metrics import (
    Counts,
    Event,
    Rows,
    Times,
    TimesBy,
    counter,
    gauge,
    make_metrics,
)

PREFIX = "kv_router_forward_"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Ended: TypeAlias = Literal[
    "answered", "passed_on", "refused", "failed", "broke_off", "client_gone", "query"
]
PrefillOutcome: TypeAlias = Literal[
    "handed_over",
    "not_used",
    "bypassed",
    "unavailable",
    "not_taken",
    "failed",
    "fell_back",
    "refused",
]
"""The outcome of a prompt; "failed" counts workers tried."""

MOST_WORKERS = 4096
"""Workers with counts of their own; further ones are counted together."""

ADMISSION_METRICS: Rows = {
    "in_flight": gauge("Requests in flight"),
    "body_bytes": gauge("Bytes of the bodies of requests"),
}
POOL_METRICS: Rows = {"engine_connections": gauge("Connections to engines", "open_connections")}
BREAKER_METRICS: Rows = {
    "ejected_workers": gauge(
        "Workers ejected by the circuit breaker", lambda breaker: len(breaker.ejected())
    )
}
PREFILL_METRICS: Rows = {
    "prefill_pools": gauge(
        "Models by the state of their prefill pool", lambda pools: pools.counts(), "state"
    )
}
KEPT_METRICS: Rows = {
    "kept_responses": gauge("Responses of which it is known which engine may keep them", len),
    "forgotten_responses": counter("Responses forgotten because of their limit", "forgotten"),
}
CACHE_METRICS: Rows = {
    "tokenizer_held_tokens": gauge(
        "Size of the cache of tokens, plus 32 for each piece of a text", "held_tokens"
    )
}
CHECK_METRICS: Rows = {
    "tokenizer_workers": gauge(
        "Workers by agreement of their engine with the tokenizer; untold: unknown",
        lambda checks: checks.counts(),
        "model",
        "kind",
        "outcome",
    ),
    "tokenizer_mismatched_block_sizes": gauge(
        "Workers with different block sizes in the engine and in the router",
        lambda checks: len(list(checks.mismatched_block_sizes())),
    ),
}


class ForwardMetrics:
    """Metrics that the components of a forwarder update."""

    requests: Annotated[Counts, Event("Requests, by outcome", ("route", "ended"))]
    refusals: Annotated[Counter, Event("Requests refused here", ("code",))]
    dropped_fields: Annotated[Counter, Event("Fields of tenants' requests that engines do not get")]
    attempts: Annotated[Counts, Event("Attempts to forward to a worker, by outcome", ("outcome",))]
    tokenizations: Annotated[
        Counts,
        Event(
            "Text prompts, by source of their tokens: local, an engine, the cache, unknown",
            ("outcome",),
        ),
    ]
    migrations: Annotated[
        Counter, Event("Streams interrupted by their worker, by outcome", ("outcome",))
    ]
    probes: Annotated[Counter, Event("Health probes of workers", ("standing", "outcome"))]
    missed_reports: Annotated[Counter, Event("Reports of progress that no router received")]
    time_to_first_token_seconds: Annotated[
        Times,
        Event(
            "Time from a request's arrival to the first piece of its response", bounds_s=_SECONDS
        ),
    ]
    attempt_seconds: Annotated[
        TimesBy,
        Event(
            "Time from the choice of a worker to the end of its response, by the engine's status "
            "(failed: none, or cut off)",
            ("model", "status"),
            bounds_s=_SECONDS,
        ),
    ]
    worker_attempts: Annotated[
        Counts, Event("Attempts at each worker, by the engine's status", ("worker_id", "status"))
    ]
    worker_seconds: Annotated[
        Counts, Event("Seconds that these attempts took", ("worker_id", "status"))
    ]
    output_tokens: Annotated[Counts, Event("Output tokens that engines reported", ("model",))]
    deciding_seconds: Annotated[
        Times,
        Event("Time until a router has placed a request, including its queue", bounds_s=_SECONDS),
    ]

    prefills: Annotated[
        Counter,
        Event("Prompts for a prefill worker, by outcome; failed: attempts", ("outcome",)),
    ]
    handed_over_tokens: Annotated[
        Counter, Event("Prompt tokens that decode workers received from prefill workers")
    ]
    prefill_news: Annotated[
        Counter, Event("Prefill events exchanged with other forwarders, by outcome", ("outcome",))
    ]
    prefill_seconds: Annotated[
        Histogram, Event("Time of a prefill on a prefill worker", bounds_s=_SECONDS)
    ]
    hand_over_seconds: Annotated[
        Histogram,
        Event(
            "Time from the end of that prefill to the first piece of the response",
            bounds_s=_SECONDS,
        ),
    ]
    tokenizer_tokens: Annotated[
        Counter, Event("Prompt tokens: from the cache (known), or new (made)", ("outcome",))
    ]

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make the metrics. `registry`: that of a process with other metrics, if there is one."""
        self.registry = CollectorRegistry() if registry is None else registry
        make_metrics(self, self.registry, PREFIX)
        self._workers: set[int] = set()
        self._known_tokens = self.tokenizer_tokens.labels("known")
        self._made_tokens = self.tokenizer_tokens.labels("made")

    def count_attempt(self, model: str, worker_id: int, status: int, time_s: float) -> None:
        """Count an attempt at a worker. `status`: 0 if it did not answer, or broke off."""
        if len(self._workers) < MOST_WORKERS:
            self._workers.add(worker_id)
        labels = worker_id if worker_id in self._workers else "other", status or "failed"
        self.worker_attempts.count(*labels)
        self.worker_seconds.count(*labels, by=time_s)
        self.attempt_seconds.note(time_s, model, status or "failed")

    def count_tokenized(self, known: int, made: int) -> None:
        """Count the tokens of a prompt; called from any thread."""
        self._known_tokens.inc(known)
        self._made_tokens.inc(made)

    def exposition(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self.registry)

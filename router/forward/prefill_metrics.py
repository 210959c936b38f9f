"""What is counted of prompts that others compute."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.forward.pools import PrefillPools

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

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


class PrefillMetrics:
    """`outcomes`: of prompts, "failed" of each worker tried."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        prefix = "kv_router_forward_"
        text = "Prompts that another worker was to compute, by what became of it"
        self.outcomes = Counter(f"{prefix}prefills", text, ("outcome",), registry=registry)
        text = "Prompt tokens that decode workers received from prefill workers"
        self.tokens = Counter(f"{prefix}handed_over_tokens", text, registry=registry)
        text = "News of workers of role prefill, from and to others that forward"
        self.news = Counter(f"{prefix}prefill_news", text, ("outcome",), registry=registry)
        self.prefill = Histogram(
            f"{prefix}prefill_seconds",
            "Until another worker had computed a prompt",
            buckets=_SECONDS,
            registry=registry,
        )
        self.hand_over = Histogram(
            f"{prefix}hand_over_seconds",
            "From there until the first piece of the answer, its queue included",
            buckets=_SECONDS,
            registry=registry,
        )

    def watch(self, pools: PrefillPools) -> None:
        """Show the state of pools, too."""
        self._registry.register(_Pools(pools))


class _Pools(Collector):
    def __init__(self, pools: PrefillPools) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """The state of this moment."""
        name = "kv_router_forward_prefill_pools"
        family = GaugeMetricFamily(
            name, "Models by the state of their prefill pool", labels=["state"]
        )
        for state, count in self._pools.counts().items():
            family.add_metric([state], count)
        yield family

"""The connector's counters, in vLLM's own log and on its /metrics: `vllm:kv_router_*`.

Imported with `vllm.py`, before vLLM's workers start; for the reason given there it imports no large
module of this project.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from worker_agent.connector.vllm_parts.counters import METRICS, Metric, together

TIER = "tier"


@dataclass
class ConnectorStats(KVConnectorStats):
    """Increases of one half, or the sum of several; `data` is `counted.Values`."""

    def reset(self) -> None:
        """See KVConnectorStats."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See KVConnectorStats."""
        return ConnectorStats(together(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the values of an interval for vLLM's log."""
        return {
            f"{tier} {name}".strip(): value
            for name, by_tier in self.data.items()
            for tier, value in by_tier.items()
        }

    def is_empty(self) -> bool:
        """See KVConnectorStats."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Every metric of `counted.METRICS`, by engine and, where it applies, by tier."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: (metric, self._made(metric)) for metric in METRICS}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See KVConnectorPromMetrics."""
        for name, by_tier in transfer_stats_data.items():
            metric, of_all = self._metrics[name]
            for tier, value in by_tier.items():
                labels = [*self.per_engine_labelvalues[engine_idx], *([tier] * metric.by_tier)]
                one = of_all.labels(*labels)
                one.set(value) if metric.is_gauge else one.inc(value)

    def _made(self, metric: Metric) -> Any:
        name = f"vllm:kv_router_{metric.name}"
        labels = [*self._labelnames, *([TIER] * metric.by_tier)]
        if metric.is_gauge:
            return self._gauge_cls(
                name, metric.documentation, labels, multiprocess_mode="mostrecent"
            )
        return self._counter_cls(name, metric.documentation, labels)

"""Gauges of each rank, read off the core when Prometheus asks; of so many ranks, and no more."""

import time
from collections.abc import Callable, Iterator
from itertools import islice

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core import RouterCore
from router.metrics import RouterMetrics
from router.protocol.values import Rank
from router.sequence.rank_table import (
    BASE_S,
    BUSY,
    CONTEXT_S,
    DECODE_BLOCKS,
    DECODE_S,
    FOREIGN_REQUESTS,
    HELD_BLOCKS,
    KV_S,
    PREFILL_S,
    PREFILL_TOKENS,
    RELATIVE_ERROR,
    REQUESTS,
    TRUST_WEIGHT,
)

_LABELS = ("worker_id", "dp_rank")

_COLUMNS = {
    "held_blocks": (HELD_BLOCKS, "Blocks held, once a tier"),
    "active_requests": (REQUESTS, "Requests booked, by whatever router"),
    "active_prefill_tokens": (PREFILL_TOKENS, "Prompt tokens booked that are left to compute"),
    "active_decode_blocks": (DECODE_BLOCKS, "Blocks booked, shared ones once"),
    "foreign_requests": (FOREIGN_REQUESTS, "Requests reported beyond those booked"),
    "busy": (BUSY, "1 above a threshold, as of the last decision"),
    "trust_weight": (TRUST_WEIGHT, "What a block of overlap counts for in predictions"),
    "rate_relative_error": (RELATIVE_ERROR, "Standard error of predicted times, as a fraction"),
}
_RATES = {
    "step": BASE_S,
    "prompt_token": PREFILL_S,
    "prompt_token_context": CONTEXT_S,
    "decode_request": DECODE_S,
    "kv_token": KV_S,
}


class RankCollector(Collector):
    """How each rank stands. Beyond `max_ranks` of them, in order of id, a gauge says how many are
    not shown.
    """

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        max_ranks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._clock = clock
        self._max_ranks = max_ranks
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment. O(ranks shown)."""
        shown = list(islice(self._ranks(), self._max_ranks))
        yield _gauge(
            "gauges_hidden", "Ranks beyond metrics_max_ranks", len(self._core.ranks) - len(shown)
        )
        yield from self._columns(shown)
        yield self._trust(shown)
        yield self._rates(shown)

    def _ranks(self) -> Iterator[Rank]:
        for worker in self._core.fleet:
            yield from worker.announcement.ranks

    def _columns(self, shown: list[Rank]) -> Iterator[Metric]:
        for name, (column, text) in _COLUMNS.items():
            family = GaugeMetricFamily(f"kv_router_worker_{name}", text, labels=_LABELS)
            for rank in shown:
                family.add_metric(_names(rank), self._core.ranks.row(rank)[column])
            yield family

    def _trust(self, shown: list[Rank]) -> Metric:
        now_s = self._clock()
        text, labels = "1 for the trust state a rank is in", (*_LABELS, "state")
        family = GaugeMetricFamily("kv_router_worker_trust", text, labels=labels)
        for rank in shown:
            family.add_metric((*_names(rank), self._core.trust(rank, now_s).state), 1)
        return family

    def _rates(self, shown: list[Rank]) -> Metric:
        text, labels = "Learned time of a unit of each kind of work", (*_LABELS, "work")
        family = GaugeMetricFamily("kv_router_worker_rate_seconds", text, labels=labels)
        for rank in shown:
            row = self._core.ranks.row(rank)
            for work, column in _RATES.items():
                family.add_metric((*_names(rank), work), row[column])
        return family


def _names(rank: Rank) -> tuple[str, str]:
    return str(rank.worker_id), str(rank.dp_rank)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_router_worker_{name}", text, value=value)

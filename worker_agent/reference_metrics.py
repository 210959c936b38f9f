"""What an agent with its own engine tells Prometheus, under the names that gateways scrape."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker_agent.agent_sharing import AgentSharing
from worker_agent.metrics import BUS_READINGS, RankCollector, Reading
from worker_agent.operations.control import TierControl
from worker_agent.operations.messages import StatusQuery
from worker_agent.operations.metrics import tier_metrics
from worker_agent.runner import RankRunner
from worker_agent.sharing_metrics import sharing_metrics

_READINGS: tuple[Reading[RankRunner], ...] = (
    Reading(
        GaugeMetricFamily,
        "vllm:num_requests_running",
        "Requests running",
        lambda rank: rank.gauges.running_requests,
    ),
    Reading(
        GaugeMetricFamily,
        "vllm:num_requests_waiting",
        "Requests waiting",
        lambda rank: rank.gauges.waiting_requests,
    ),
    Reading(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Blocks in use; 1 is all",
        lambda rank: rank.gauges.kv_used_blocks / rank.constants.num_blocks,
    ),
    Reading(
        CounterMetricFamily,
        "vllm:prompt_tokens",
        "Prompt tokens computed",
        lambda rank: rank.counters.prefill_tokens,
    ),
    Reading(
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        "Prompt tokens that were cached",
        lambda rank: rank.counters.cached_tokens,
    ),
    Reading(
        CounterMetricFamily,
        "kv_agent_busy_seconds",
        "Time spent computing",
        lambda rank: rank.counters.busy_s,
    ),
    *BUS_READINGS,
)


class AgentCollector(RankCollector[RankRunner]):
    """Every rank, and the size of its cache."""

    def __init__(
        self,
        model_name: str,
        block_size: int,
        runners: Sequence[RankRunner],
        tiers: TierControl,
        sharing: AgentSharing | None = None,
    ) -> None:
        self._sharing = sharing
        self._model_name = model_name
        self._tiers = tiers
        self._block_size = block_size
        self._runners = runners
        self._num_blocks = runners[0].constants.num_blocks
        super().__init__(lambda: model_name, _READINGS, lambda: runners)

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment."""
        yield from super().collect()
        labels = ("block_size", "num_gpu_blocks")
        info = GaugeMetricFamily("vllm:cache_config_info", "Size of a rank's cache", labels=labels)
        info.add_metric((str(self._block_size), str(self._num_blocks)), 1)
        yield info
        prompt_tokens = {
            runner.rank.dp_rank: runner.counters.prefill_tokens + runner.counters.cached_tokens
            for runner in self._runners
        }
        yield from tier_metrics(
            self._model_name,
            self._block_size,
            self._tiers.status(StatusQuery()).tiers,
            prompt_tokens,
        )
        if self._sharing is not None:
            yield from sharing_metrics(self._model_name, self._sharing)

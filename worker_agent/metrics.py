"""What an agent tells Prometheus, mostly under the names that gateways scrape from vLLM."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_agent.runner import RankRunner

_LABELS = ("model_name", "dp_rank")


class _Reading(Struct, frozen=True):
    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    read: Callable[[RankRunner], float]


_READINGS = (
    _Reading(
        GaugeMetricFamily,
        "vllm:num_requests_running",
        "Requests running",
        lambda rank: rank.gauges.running_requests,
    ),
    _Reading(
        GaugeMetricFamily,
        "vllm:num_requests_waiting",
        "Requests waiting",
        lambda rank: rank.gauges.waiting_requests,
    ),
    _Reading(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Blocks in use; 1 is all",
        lambda rank: rank.gauges.kv_used_blocks / rank.constants.num_blocks,
    ),
    _Reading(
        CounterMetricFamily,
        "vllm:prompt_tokens",
        "Prompt tokens computed",
        lambda rank: rank.counters.prefill_tokens,
    ),
    _Reading(
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        "Prompt tokens that were cached",
        lambda rank: rank.counters.cached_tokens,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_busy_seconds",
        "Time spent computing",
        lambda rank: rank.counters.busy_s,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_publish_failures",
        "Event messages that the bus did not take",
        lambda rank: rank.events.failures,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_publish_refusals",
        "Event messages that found the stream full",
        lambda rank: rank.events.refusals,
    ),
    _Reading(
        GaugeMetricFamily,
        "kv_agent_publish_waiting_seconds",
        "For how long the oldest change has waited that the log does not have yet",
        lambda rank: rank.events.waiting_s,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_load_reports_missed",
        "Load reports that could not be sent",
        lambda rank: rank.loads.missed,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_queries_answered",
        "Questions about events and load that were answered",
        lambda rank: rank.answers.answered,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_queries_refused",
        "Questions that were malformed, or came while too many waited",
        lambda rank: rank.answers.refused,
    ),
    _Reading(
        CounterMetricFamily,
        "kv_agent_answers_undelivered",
        "Answers that the bus did not take",
        lambda rank: rank.answers.undelivered,
    ),
)


class AgentCollector(Collector):
    """Reads every rank when Prometheus asks; `registry` is its own."""

    def __init__(self, model_name: str, block_size: int, runners: Sequence[RankRunner]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._block_size = block_size
        self._runners = runners
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Metrics of this moment, one sample a rank."""
        for reading in _READINGS:
            metric = reading.family(reading.name, reading.text, labels=_LABELS)
            for runner in self._runners:
                labels = (self._model_name, str(runner.rank.dp_rank))
                metric.add_metric(labels, reading.read(runner))
            yield metric
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        labels = ("block_size", "num_gpu_blocks")
        info = GaugeMetricFamily("vllm:cache_config_info", "Size of a rank's cache", labels=labels)
        num_blocks = self._runners[0].constants.num_blocks
        info.add_metric((str(self._block_size), str(num_blocks)), 1)
        return info

"""The Prometheus metrics of engines in this project's terms: cache sizes and rank loads.

          rank      running, waiting  used blocks           computed, cached, generated tokens
vLLM      engine    num_requests_*    usage × blocks        prompt_tokens_by_source
SGLang    dp_rank   num_*_reqs        usage × pages         realtime_tokens, by mode
TRT-LLM   (one)     num_requests_*    kv_cache_used_blocks  prompt − prompt_cached

A generated token counts as one decoding request in one step. No engine reports the attention cost
of prefills, and only SGLang its busy time; these counters are 0. `rate_windows.py` estimates them.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Literal, TypeAlias

from msgspec import Struct

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen
from router.publisher.engine_metrics.prometheus_text import Sample

EngineKind: TypeAlias = Literal["vllm", "sglang", "trtllm"]

Sources: TypeAlias = tuple[tuple[str, str | None], ...]
"""The possible sources of a size: a metric, and a label of it if the value is not the size."""


class EngineLimits(Struct, frozen=True):
    """The constants of an engine's life; None: unknown. `total_kv_blocks`: blocks of one rank."""

    model_name: str | None = None
    block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None


_VLLM_HITS = "vllm:prefix_cache_hits_total"

MOST_COUNT = 2**53
"""The limit of a count; a float above it is not exact. It also bounds sums of counts to 64 bits."""


def whole_number(value: float) -> int:
    """Return a metric as a count, rounded down: 0 if it is negative, and at most `MOST_COUNT`."""
    return int(min(max(0.0, value), MOST_COUNT))


class RankMetrics:
    """The metrics of one rank. Of reports by several processes the maximum counts."""

    __slots__ = ("_dp_rank", "_label", "_samples")

    def __init__(self, samples: Mapping[str, list[Sample]], label: str, dp_rank: int) -> None:
        self._samples = samples
        self._label = label
        self._dp_rank = dp_rank

    def first(self, names: tuple[str, ...], **labels: str) -> float | None:
        """Return the value of the first of these metrics that exists, or None."""
        found = (self._values(name, labels) for name in names)
        return next((max(values) for values in found if values), None)

    def count(self, *names: str, **labels: str) -> int:
        """Return the value of the first existing metric as a count, or 0."""
        return whole_number(self.first(names, **labels) or 0.0)

    def total(self, name: str) -> int:
        """Return the sum over all other labels."""
        return whole_number(sum(self._values(name, {})))

    def seconds(self, name: str) -> float:
        """Return the value of a metric, or 0."""
        return max(self.first((name,)) or 0.0, 0.0)

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Return the finite buckets of a histogram, from 0: each limit, and the number up to it."""
        found = {0.0: 0.0}
        for sample in self._samples.get(name, ()):
            with suppress(ValueError):
                limit = float(sample.labels.get("le", "")) if self._is_ours(sample) else math.inf
                if math.isfinite(limit):
                    found[limit] = max(found.get(limit, 0.0), sample.value)
        return sorted(found.items())

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float]:
        return [
            sample.value
            for sample in self._samples.get(name, ())
            if self._is_ours(sample) and labels.items() <= sample.labels.items()
        ]

    def _is_ours(self, sample: Sample) -> bool:
        """Return whether a sample is of this rank; without a rank label it is of rank 0."""
        return sample.labels.get(self._label, "0") == str(self._dp_rank)


class Dialect(Struct, frozen=True):
    """The metrics of one kind of engine. `names`: all metrics that are read.

    `pool_tokens`: the tokens of a rank's pool. If an engine does not report them, `total_kv_blocks`
    applies, which is the sum over its ranks if `is_pool_summed`.
    """

    rank_label: str
    running: str
    names: frozenset[str]
    load: Callable[[RankMetrics, EngineLimits], EngineLoad]
    block_size: Sources
    total_kv_blocks: Sources
    max_num_batched_tokens: Sources = ()
    pool_tokens: Sources = ()
    is_pool_summed: bool = False


def _vllm(rank: RankMetrics, facts: EngineLimits) -> EngineLoad:
    finished = rank.total("vllm:request_success_total")
    running = rank.count("vllm:num_requests_running")
    waiting = rank.count("vllm:num_requests_waiting")
    computed, cached = _vllm_prompts(rank)
    usage = rank.first(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"))
    used_blocks = _share(usage, facts)
    return EngineLoad(
        LoadGauges(running, waiting, kv_used_blocks=used_blocks),
        LoadCounters(
            steps=rank.count("vllm:iteration_tokens_total_count"),
            prefill_tokens=computed,
            decode_requests=rank.count("vllm:generation_tokens_total"),
            requests_received=finished + running + waiting,
            requests_finished=finished,
            cached_tokens=cached,
        ),
        _constants(facts),
        _vllm_work(
            rank,
            computed,
            used_blocks * (facts.block_size or 0),
            is_working=running > 0 or _vllm_waits(rank, waiting),
        ),
    )


def _vllm_waits(rank: RankMetrics, waiting: int) -> bool:
    """Return whether requests wait for the engine, and not for blocks of others (from 0.24)."""
    return waiting > rank.count("vllm:num_requests_waiting_by_reason", reason="deferred")


def _vllm_work(
    rank: RankMetrics, computed: int, used_tokens: int, *, is_working: bool
) -> WorkSeen | None:
    """Return the counters of its rates.

    Returns None before 0.16, where computed tokens are known at the end only.
    """
    if rank.first(("vllm:prompt_tokens_by_source_total",)) is None:
        return None
    queries, hits = rank.count("vllm:prefix_cache_queries_total"), rank.count(_VLLM_HITS)
    hits += rank.count("vllm:external_prefix_cache_hits_total")
    return WorkSeen(
        steps=rank.count("vllm:iteration_tokens_total_count"),
        prompt_tokens=computed,
        admitted_tokens=queries - hits,
        outputs=rank.count("vllm:inter_token_latency_seconds_count"),
        outputs_s=rank.seconds("vllm:inter_token_latency_seconds_sum"),
        preemptions=rank.count("vllm:num_preemptions_total"),
        is_working=is_working,
        used_tokens=used_tokens,
        finished=rank.count("vllm:request_prefill_time_seconds_count"),
        finished_tokens=rank.count("vllm:request_prefill_kv_computed_tokens_sum"),
        finished_s=rank.seconds("vllm:request_prefill_time_seconds_sum"),
        context_tokens=_vllm_context(rank, hits / max(queries, 1)),
    )


def _vllm_context(rank: RankMetrics, cached: float) -> float:
    """Return the mean context of computed prompt tokens, of prompts with this part `cached`.

    Long prompts have most of it: Σ n² / 2 Σ n for prompts of n tokens, which a histogram counts.
    """
    counts = rank.buckets("vllm:request_prompt_tokens_bucket")
    tokens = squares = 0.0
    for (low, below), (high, up_to) in pairwise(counts):
        middle = (low + high) / 2
        tokens += (up_to - below) * middle
        squares += (up_to - below) * middle * middle
    mean = squares / tokens if tokens else 0.0
    if not tokens:
        requests = rank.count("vllm:request_prompt_tokens_count")
        mean = rank.count("vllm:request_prompt_tokens_sum") / requests if requests else 0.0
    return mean / 2 * (1 + cached)


def _vllm_prompts(rank: RankMetrics) -> tuple[int, int]:
    """Return the computed and the cached prompt tokens.

    Up to 0.15 they are not counted by source. Prompts are counted at their first token and hits at
    admission, so that their difference is too low by the prompts in work.
    """
    by_source = "vllm:prompt_tokens_by_source_total"
    if rank.first((by_source,)) is not None:
        computed = rank.count(by_source, source="local_compute")
        return computed, rank.count(by_source, source="local_cache_hit")
    cached = rank.count(_VLLM_HITS, "vllm:gpu_prefix_cache_hits_total")
    return max(rank.count("vllm:prompt_tokens_total") - cached, 0), cached


def _sglang(rank: RankMetrics, facts: EngineLimits) -> EngineLoad:
    tokens = "sglang:realtime_tokens_total"
    return EngineLoad(
        LoadGauges(
            rank.count("sglang:num_running_reqs"),
            rank.count("sglang:num_queue_reqs"),
            kv_used_blocks=_share(rank.first(("sglang:token_usage",)), facts),
        ),
        LoadCounters(
            prefill_tokens=rank.count(tokens, mode="prefill_compute"),
            decode_requests=rank.count(tokens, mode="decode"),
            cached_tokens=rank.count(tokens, mode="prefill_cache"),
        ),
        _constants(facts),
    )


def _trtllm(rank: RankMetrics, facts: EngineLimits) -> EngineLoad:
    finished = rank.count("trtllm_num_requests_completed_total")
    running = rank.count("trtllm_num_requests_running")
    waiting = rank.count("trtllm_num_requests_waiting")
    cached = rank.count("trtllm_prompt_cached_tokens_total")
    return EngineLoad(
        LoadGauges(running, waiting, kv_used_blocks=rank.count("trtllm_kv_cache_used_blocks")),
        LoadCounters(
            prefill_tokens=max(rank.count("trtllm_prompt_tokens_total") - cached, 0),
            decode_requests=rank.count("trtllm_generation_tokens_total"),
            requests_received=finished + running + waiting,
            requests_finished=finished,
            cached_tokens=cached,
        ),
        _constants(facts, rank.count("trtllm_max_batch_size_static")),
    )


def _share(usage: float | None, facts: EngineLimits) -> int:
    """Return a fraction of the cache as a number of blocks."""
    return whole_number((usage or 0.0) * (facts.total_kv_blocks or 0) + 0.5)


def _constants(facts: EngineLimits, max_running_requests: int = 0) -> LoadConstants:
    return LoadConstants(
        facts.max_num_batched_tokens or 0, max_running_requests, facts.total_kv_blocks or 0
    )


DIALECTS: Mapping[EngineKind, Dialect] = {
    "vllm": Dialect(
        rank_label="engine",
        running="vllm:num_requests_running",
        names=frozenset(
            {
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "vllm:gpu_cache_usage_perc",
                "vllm:prompt_tokens_total",
                "vllm:prompt_tokens_by_source_total",
                "vllm:generation_tokens_total",
                _VLLM_HITS,
                "vllm:gpu_prefix_cache_hits_total",
                "vllm:request_success_total",
                "vllm:iteration_tokens_total_count",
                "vllm:num_requests_waiting_by_reason",
                "vllm:num_preemptions_total",
                "vllm:prefix_cache_queries_total",
                "vllm:external_prefix_cache_hits_total",
                "vllm:request_prefill_time_seconds_count",
                "vllm:request_prefill_time_seconds_sum",
                "vllm:request_prefill_kv_computed_tokens_sum",
                "vllm:request_prompt_tokens_bucket",
                "vllm:request_prompt_tokens_count",
                "vllm:request_prompt_tokens_sum",
                "vllm:inter_token_latency_seconds_count",
                "vllm:inter_token_latency_seconds_sum",
                "vllm:cache_config_info",
            }
        ),
        load=_vllm,
        block_size=(  # a hybrid model's blocks are counted in the tokens of a hash
            ("vllm:cache_config_info", "prefix_match_unit"),
            ("vllm:cache_config_info", "block_size"),
        ),
        total_kv_blocks=(("vllm:cache_config_info", "num_gpu_blocks"),),
        pool_tokens=(("vllm:cache_config_info", "kv_cache_size_tokens"),),  # from 0.24
        is_pool_summed=True,
    ),
    "sglang": Dialect(
        rank_label="dp_rank",
        running="sglang:num_running_reqs",
        names=frozenset(
            {
                "sglang:num_running_reqs",
                "sglang:num_queue_reqs",
                "sglang:token_usage",
                "sglang:realtime_tokens_total",
                "sglang:cache_config_info",
                "sglang:page_size",
                "sglang:num_pages",
            }
        ),
        load=_sglang,
        block_size=(("sglang:cache_config_info", "page_size"), ("sglang:page_size", None)),
        total_kv_blocks=(("sglang:cache_config_info", "num_pages"), ("sglang:num_pages", None)),
    ),
    "trtllm": Dialect(
        rank_label="rank",
        running="trtllm_num_requests_running",
        names=frozenset(
            {
                "trtllm_num_requests_running",
                "trtllm_num_requests_waiting",
                "trtllm_num_requests_completed_total",
                "trtllm_kv_cache_used_blocks",
                "trtllm_kv_cache_max_blocks",
                "trtllm_kv_cache_tokens_per_block",
                "trtllm_max_num_tokens_runtime",
                "trtllm_max_batch_size_static",
                "trtllm_prompt_tokens_total",
                "trtllm_prompt_cached_tokens_total",
                "trtllm_generation_tokens_total",
            }
        ),
        load=_trtllm,
        block_size=(("trtllm_kv_cache_tokens_per_block", None),),
        total_kv_blocks=(("trtllm_kv_cache_max_blocks", None),),
        max_num_batched_tokens=(("trtllm_max_num_tokens_runtime", None),),
    ),
}

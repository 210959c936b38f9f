"""The metrics of a simulated engine as vLLM counts and names them.

Steps count if they give an output, a prompt counts whole at its first token, its cache hits count
when it is admitted, and gauges are those of the last completed step.
"""

import numpy as np

from router.simulator.engine import Engine

_LIMITS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
"""The buckets of prompt lengths."""


def vllm_metrics(engine: Engine, block_size: int, now_s: float) -> str:
    """Return the text that `GET /metrics` would return at this moment. O(finished requests)."""
    seen, capacity = engine.observed(now_s), engine.cache.capacity_blocks
    counters, gauges = seen.counters, seen.gauges
    values = {
        "num_requests_running": gauges.running_requests,
        "num_requests_waiting": gauges.waiting_requests,
        "kv_cache_usage_perc": gauges.kv_used_blocks / capacity,
        "prefix_cache_queries_total": seen.queried_tokens,
        "prefix_cache_hits_total": seen.hit_tokens,
        "generation_tokens_total": seen.generated_tokens,
        "iteration_tokens_total_count": seen.output_steps,
        "inter_token_latency_seconds_count": counters.decode_requests,
        "inter_token_latency_seconds_sum": seen.outputs_s,
        "num_preemptions_total": seen.preemptions,
        "request_success_total": counters.requests_finished,
        "request_prefill_time_seconds_count": counters.requests_finished,
        "request_prefill_time_seconds_sum": seen.finished_s,
        "request_prefill_kv_computed_tokens_sum": seen.finished_tokens,
    }
    lines = [_line(name, value) for name, value in values.items()]
    by_source = {"local_compute": seen.prompt_tokens, "local_cache_hit": seen.found_tokens}
    for source, tokens in by_source.items():
        lines.append(_line("prompt_tokens_by_source_total", tokens, f'source="{source}"'))
    size = f'block_size="{block_size}",num_gpu_blocks="{capacity}"'
    lines.append(_line("cache_config_info", 1, size))
    counts = np.searchsorted(np.sort(seen.finished_isl_tokens), _LIMITS, side="right").tolist()
    for limit, count in zip(_LIMITS, counts, strict=True):
        lines.append(_line("request_prompt_tokens_bucket", count, f'le="{limit}"'))
    return "\n".join(lines)


def _line(name: str, value: float, *labels: str) -> str:
    engine = 'engine="0"'
    return f"vllm:{name}{{{','.join((engine, *labels))}}} {value}"

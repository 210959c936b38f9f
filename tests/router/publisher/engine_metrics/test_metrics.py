"""Three engines' metrics, in our words."""

from pathlib import Path

import pytest

from router.errors import WireError
from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.publisher.engine_metrics.dialects import MOST_COUNT, EngineLimits
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen
from router.publisher.engine_metrics.metrics import EngineMetrics

VLLM = (Path(__file__).parents[3] / "vectors" / "metrics" / "vllm_0.32.txt").read_text()
VLLM_FACTS = EngineLimits("tiny", 32, 80, None)
SEEN = WorkSeen(
    steps=40,
    prompt_tokens=424,
    admitted_tokens=424,
    outputs=35,
    outputs_s=0.08017437399962546,
    finished=5,
    finished_tokens=424,
    finished_s=0.03477129500015508,
    context_tokens=157.6,  # 5 prompts of 200 tokens: half of it, and what was cached before
)

SGLANG = """\
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="0",dp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="1",dp_rank="1"} 5.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="2",dp_rank="1"} 5.0
sglang:num_queue_reqs{model_name="m",pp_rank="0",tp_rank="1",dp_rank="1"} 2.0
sglang:token_usage{model_name="m",pp_rank="0",tp_rank="1",dp_rank="1"} 0.25
sglang:realtime_tokens_total{dp_rank="1",mode="prefill_compute",model_name="m"} 700.0
sglang:realtime_tokens_total{dp_rank="1",mode="prefill_cache",model_name="m"} 300.0
sglang:realtime_tokens_total{dp_rank="1",mode="decode",model_name="m"} 44.0
"""
SGLANG_SIZES = (
    'sglang:cache_config_info{model_name="m",page_size="64",num_pages="1000"} 1.0\n',
    'sglang:page_size{model_name="m"} 64.0\nsglang:num_pages{model_name="m"} 1000.0\n',
)

TRTLLM = """\
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 4.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1.0
trtllm_num_requests_completed_total{engine_type="trtllm",model_name="m"} 10.0
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m"} 77.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 500.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_max_num_tokens_runtime{engine_type="trtllm",model_name="m"} 8192.0
trtllm_max_batch_size_static{engine_type="trtllm",model_name="m"} 256.0
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 1000.0
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="m"} 600.0
trtllm_generation_tokens_total{engine_type="trtllm",model_name="m"} 90.0
"""


TWO_RANKS = """\
vllm:num_requests_running{{engine="0",model_name="tiny"}} 0.0
vllm:num_requests_running{{engine="1",model_name="tiny"}} 0.0
vllm:cache_config_info{{block_size="32",engine="0",{tokens}num_gpu_blocks="400"}} 1.0
vllm:cache_config_info{{block_size="32",engine="1",{tokens}num_gpu_blocks="400"}} 1.0
"""


@pytest.mark.parametrize(
    "tokens", ['kv_cache_size_tokens="6400",', "", 'kv_cache_size_tokens="None",']
)
def test_pool_of_a_rank_is_not_the_sum_that_vllm_reports(tokens):
    metrics = EngineMetrics("vllm", TWO_RANKS.format(tokens=tokens))
    assert metrics.rank_count == 2
    assert metrics.facts().total_kv_blocks == 200


def test_vllm_as_it_was_recorded():
    metrics = EngineMetrics("vllm", VLLM)
    assert metrics.facts() == VLLM_FACTS
    assert metrics.load(0, VLLM_FACTS) == EngineLoad(
        LoadGauges(),
        LoadCounters(
            steps=40,
            prefill_tokens=424,
            decode_requests=40,
            requests_received=5,
            requests_finished=5,
            cached_tokens=576,
        ),
        LoadConstants(num_blocks=80),
        SEEN,
    )
    assert metrics.load(1, VLLM_FACTS) is None


def test_vllm_without_sources_tells_no_work():
    text = "\n".join(line for line in VLLM.splitlines() if "by_source" not in line)
    assert EngineMetrics("vllm", text).load(0, VLLM_FACTS).seen is None


def test_context_is_that_of_long_prompts_which_have_most_of_it():
    counts = {"1.0": 0, "100.0": 30, "1000.0": 31, "+Inf": 31}
    lines = [
        f'vllm:request_prompt_tokens_bucket{{engine="0",model_name="tiny",le="{le}"}} {count}.0'
        for le, count in counts.items()
    ]
    text = "\n".join([*(x for x in VLLM.splitlines() if "prompt_tokens_bucket" not in x), *lines])
    found = EngineMetrics("vllm", text).load(0, VLLM_FACTS).seen.context_tokens
    squares, tokens = 30 * 50.5**2 + 550**2, 30 * 50.5 + 550
    assert found == pytest.approx(squares / tokens / 2 * (1 + 576 / 1000))


def test_deferred_requests_are_no_work():
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="tiny"} '
    reason = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason='
    text = VLLM.replace(f"{waiting}0.0", f"{waiting}3.0")
    for deferred, is_working in ((3, False), (2, True)):
        lines = [x for x in text.splitlines() if "waiting_by_reason" not in x]
        lines.append(f'{reason}"deferred"}} {deferred}.0')
        load = EngineMetrics("vllm", "\n".join(lines)).load(0, VLLM_FACTS)
        assert load.seen.is_working == is_working


def test_a_process_alone_is_no_engine():
    metrics = EngineMetrics("vllm", "process_start_time_seconds 1.75e9\n")
    assert metrics.is_foreign
    assert metrics.started_s == 1.75e9


def test_vllm_without_sources_counts_prompts_less_hits():
    text = "\n".join(line for line in VLLM.splitlines() if "by_source" not in line)
    counters = EngineMetrics("vllm", text + "\n").load(0, VLLM_FACTS).counters
    assert (counters.prefill_tokens, counters.cached_tokens) == (424, 576)


def test_vllm_hits_of_prompts_in_work_do_not_lower_computed_tokens():
    """Hits are counted at admission, prompts at their first token."""
    hits = 'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} '
    assert f"{hits}576.0" in VLLM
    text = VLLM.replace(f"{hits}576.0", f"{hits}900.0")
    counters = EngineMetrics("vllm", text).load(0, VLLM_FACTS).counters
    assert (counters.prefill_tokens, counters.cached_tokens) == (424, 576)


@pytest.mark.parametrize("usage", ["kv_cache_usage_perc", "gpu_cache_usage_perc"])
def test_vllm_ranks_are_separate(usage):
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1}\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} {rank + 5}\n'
        f'vllm:{usage}{{engine="{rank}",model_name="m"}} 0.{rank + 1}\n'
        for rank in range(2)
    )
    metrics, facts = EngineMetrics("vllm", text), EngineLimits("m", 16, 1000, 2048)
    loads = [metrics.load(rank, facts) for rank in range(2)]
    assert [load.gauges for load in loads] == [LoadGauges(1, 5, 0, 100), LoadGauges(2, 6, 0, 200)]
    assert loads[0].constants == LoadConstants(2048, 0, 1000)


@pytest.mark.parametrize("sizes", SGLANG_SIZES)
def test_sglang(sizes):
    metrics = EngineMetrics("sglang", SGLANG + sizes)
    facts = metrics.facts()
    assert facts == EngineLimits("m", 64, 1000, None)
    assert metrics.load(1, facts) == EngineLoad(
        LoadGauges(5, 2, 0, 250),
        LoadCounters(prefill_tokens=700, decode_requests=44, cached_tokens=300),
        LoadConstants(num_blocks=1000),
    )
    assert metrics.load(0, facts).gauges == LoadGauges(3)


def test_trtllm():
    metrics = EngineMetrics("trtllm", TRTLLM)
    facts = metrics.facts()
    assert facts == EngineLimits("m", 32, 500, 8192)
    assert metrics.load(0, facts) == EngineLoad(
        LoadGauges(4, 1, 0, 77),
        LoadCounters(
            prefill_tokens=400,
            decode_requests=90,
            requests_received=15,
            requests_finished=10,
            cached_tokens=600,
        ),
        LoadConstants(8192, 256, 500),
    )
    assert metrics.load(1, facts) is None


@pytest.mark.parametrize("value", ["1e300", "1.7e308", "-1e300"])
def test_values_that_no_engine_has_become_counts_that_a_report_can_carry(value):
    text = f"""vllm:num_requests_running 1
vllm:num_requests_waiting {value}
vllm:kv_cache_usage_perc {value}
vllm:request_success_total{{a="1"}} {value}
vllm:request_success_total{{a="2"}} {value}
vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="50"}} 1
"""
    metrics = EngineMetrics("vllm", text)
    facts = metrics.facts()
    assert (facts.block_size, facts.total_kv_blocks) == (None, 50)
    load = metrics.load(0, facts)
    most = 0 if value.startswith("-") else MOST_COUNT
    gauges, counters = load.gauges, load.counters
    assert (gauges.waiting_requests, gauges.kv_used_blocks) == (most, most)
    assert (counters.requests_finished, counters.requests_received) == (most, 2 * most + 1)


def test_metrics_of_another_engine_are_ignored():
    metrics = EngineMetrics("sglang", VLLM)
    assert metrics.is_foreign
    assert (metrics.facts(), metrics.load(0, VLLM_FACTS)) == (EngineLimits(), None)


def test_invalid_sizes_are_unknown():
    text = 'vllm:cache_config_info{block_size="None",num_gpu_blocks="0"} 1'
    assert EngineMetrics("vllm", text).facts() == EngineLimits()


def test_a_malformed_metric_is_named():
    with pytest.raises(WireError, match="line 1"):
        EngineMetrics("vllm", "vllm:num_requests_running{engine=0} 1")

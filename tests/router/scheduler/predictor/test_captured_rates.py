"""Rates of a real vLLM, from its metrics polled once a second and from what its client saw."""

import json
from pathlib import Path

import numpy as np
import pytest

from router.protocol.loads import LoadCounters, LoadGauges, PolledLoad
from router.protocol.values import Rank
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen
from router.publisher.engine_metrics.rate_windows import RateEstimator
from router.scheduler.predictor.predictor import Predictor
from router.sequence.active.tracker import FirstToken
from router.sequence.rank_table import CONTEXT_S, PREFILL_S, RATE_ERROR, RankTable

CAPTURED = Path(__file__).parents[3] / "vectors" / "metrics" / "vllm_0.32_rates.json"
CAPACITY_TOKENS, STEP_MS = 6_400, 1.9
RANK = Rank(1, 0)


@pytest.fixture(scope="module")
def captured():
    return json.loads(CAPTURED.read_text())


def named(rows, columns):
    return [dict(zip(columns, row, strict=True)) for row in rows]


def engine_load(poll):
    """A poll as `EngineMetrics` reads it. The capture has no histogram of prompt lengths."""
    computed = poll["prompt_tokens_by_source_total{source=local_compute}"]
    gauges = LoadGauges(poll["num_requests_running"], poll["num_requests_waiting"])
    counters = LoadCounters(
        steps=poll["iteration_tokens_total_count"],
        prefill_tokens=computed,
        decode_requests=poll["generation_tokens_total"],
        requests_finished=poll["request_prefill_time_seconds_count"],
    )
    seen = WorkSeen(
        steps=poll["iteration_tokens_total_count"],
        prompt_tokens=computed,
        admitted_tokens=poll["prefix_cache_queries_total"] - poll["prefix_cache_hits_total"],
        outputs=poll["inter_token_latency_seconds_count"],
        outputs_s=poll["inter_token_latency_seconds_sum"],
        preemptions=poll["num_preemptions_total"],
        is_working=gauges.running_requests + gauges.waiting_requests > 0,
        used_tokens=round(poll["kv_cache_usage_perc"] * CAPACITY_TOKENS),
        finished=poll["request_prefill_time_seconds_count"],
        finished_tokens=poll["request_prefill_kv_computed_tokens_sum"],
        finished_s=poll["request_prefill_time_seconds_sum"],
        context_tokens=630.0,
    )
    return EngineLoad(gauges, counters, seen=seen)


def first_tokens(captured):
    """Those of prompts without another ahead of them, and when they came."""
    requests = named(captured["requests"], captured["request_columns"])
    for request in requests:
        sent_s = request["start"]
        others = [each for each in requests if each["start"] <= sent_s and each is not request]
        if any(sent_s < each["start"] + each["ttft_s"] for each in others):
            continue
        beside = [each for each in others if sent_s < each["start"] + each["total_s"]]
        tokens = max(request["prompt_tokens"] - request["cached_tokens"], 1)
        contexts = tokens * (request["prompt_tokens"] - tokens / 2)
        kv_tokens = sum(each["prompt_tokens"] for each in beside)
        token = FirstToken(request["ttft_s"], tokens, contexts, len(beside), kv_tokens)
        yield sent_s + request["ttft_s"], token


def learned(captured, *, with_polls, with_first_tokens):
    """The row of a rank after all that was captured, in its order."""
    table = RankTable()
    table.add(RANK)
    predictor, estimator = Predictor(table), RateEstimator()
    predictor.add(RANK, "m", 0.0)
    events = list(first_tokens(captured)) if with_first_tokens else []
    if with_polls:
        polls = named(captured["polls"], captured["poll_columns"])
        events += [(poll["t"] + poll["took_s"], poll) for poll in polls]
    for at_s, event in sorted(events, key=lambda each: each[0]):
        if isinstance(event, FirstToken):
            predictor.add_first_tokens([(RANK, event)], at_s)
            continue
        middle_s = event["t"] + event["took_s"] / 2
        load = estimator.take(engine_load(event), middle_s, event["took_s"])
        polled = PolledLoad(
            worker_id=1,
            dp_rank=0,
            source_id=1,
            life_id=estimator.life,
            counters=load.counters,
            gauges=load.gauges,
            timed=load.timed,
        )
        predictor.observe(polled, at_s)
    return table.row(RANK)


@pytest.mark.parametrize(("polls", "tokens"), [(True, False), (False, True), (True, True)])
def test_half_a_minute_teaches_what_a_prompt_token_takes(captured, polls, tokens):
    """The truth: the same engine asked one request at a time, less a step for each."""
    alone = captured["alone"]["prefill_ms_by_prompt_tokens"]
    lengths = np.array([float(each) for each in alone])
    true_s = 1e-3 * (sum(alone.values()) - STEP_MS * len(alone)) / lengths.sum()
    row = learned(captured, with_polls=polls, with_first_tokens=tokens)
    found_s = lengths @ (row[PREFILL_S] + row[CONTEXT_S] * lengths / 2) / lengths.sum()
    assert found_s == pytest.approx(true_s, rel=0.2)


def test_nothing_learned_is_shown_as_unknown(captured):
    nothing = learned(captured, with_polls=False, with_first_tokens=False)
    assert nothing[RATE_ERROR] > 1.0
    known = learned(captured, with_polls=True, with_first_tokens=True)
    assert known[RATE_ERROR] < 0.5

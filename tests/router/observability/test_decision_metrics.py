"""What is counted of decisions."""

import pytest

from router.observability.metrics import RouterMetrics
from router.sequence.active.stages import FIND, SCHEDULING, Stages


@pytest.fixture
def metrics():
    return RouterMetrics()


@pytest.fixture
def registry(metrics):
    return metrics.registry


def timed(**seconds):
    """Stages that took the given times."""
    moments = iter([0.0, seconds["find"], seconds["find"] + seconds["scheduling"]])
    stages = Stages(lambda: next(moments))
    stages.end(FIND)
    stages.end(SCHEDULING)
    return stages


def test_decisions_are_counted_by_command_and_in_tokens(metrics, registry):
    metrics.decisions.note("select", "aggregated", 100, 64, timed(find=0.001, scheduling=0.001))
    metrics.decisions.note("select_and_reserve", "aggregated", 50, 0, None)
    assert registry.get_sample_value("kv_router_decisions_total", {"command": "select"}) == 1
    assert registry.get_sample_value("kv_router_prompt_tokens_total") == 150
    assert registry.get_sample_value("kv_router_predicted_cached_tokens_total") == 64


def test_every_stage_is_timed_by_the_role_of_the_chosen_worker(metrics, registry):
    metrics.decisions.note("select", "decode", 1, 0, timed(find=0.00002, scheduling=0.5))
    labels = {"stage": "find", "worker_type": "decode"}
    name = "kv_router_decision_stage_seconds"
    assert registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(0.00002)
    bucket = f"{name}_bucket"
    assert registry.get_sample_value(bucket, {**labels, "le": "1e-05"}) == 0
    assert registry.get_sample_value(bucket, {**labels, "le": "3e-05"}) == 1
    assert registry.get_sample_value(bucket, {**labels, "le": "+Inf"}) == 1
    assert registry.get_sample_value("kv_router_decision_seconds_sum") == pytest.approx(0.50002)


def test_a_stage_that_did_not_take_place_has_no_time(metrics, registry):
    metrics.decisions.note("select", "aggregated", 1, 0, timed(find=0.1, scheduling=0.1))
    metrics.decisions.note("select_and_reserve", "aggregated", 1, 0, None)
    labels = {"stage": "block_hashing", "worker_type": "aggregated"}
    assert registry.get_sample_value("kv_router_decision_stage_seconds_count", labels) is None
    assert registry.get_sample_value("kv_router_decision_seconds_count") == 1

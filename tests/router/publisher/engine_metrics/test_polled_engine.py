"""Engines that are polled: where they are asked, and what their answers mean."""

import json

import pytest

from router.errors import WireError
from router.protocol.loads import LoadConstants, LoadGauges
from router.publisher.engine_metrics.dialects import EngineLimits
from router.publisher.engine_metrics.polled_engine import PolledEngine
from router.publisher.engine_metrics.sglang_loads import sglang_loads
from support.engines.metrics_server import vllm_metrics

LIMITS = EngineLimits(block_size=64, total_kv_blocks=500, max_num_batched_tokens=2_048)
RANK_LOAD = {
    "dp_rank": 1,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
    "num_waiting_uncached_tokens": 900,
    "num_used_tokens": 130,
    "max_total_num_tokens": 6_400,
    "max_running_requests": 256,
    "total_prefill_uncached_tokens": 5_000,
    "total_prefill_busy_us": 750_000,
    "decode_moments": [100, 400, 2_000_000, 1_700, 8_100_000, 400],
    "cache_hit_rate": 0.5,
}


def loads(*ranks):
    return json.dumps({"version": "0.5.23", "loads": list(ranks)}).encode()


def test_sglang_says_how_long_prompts_and_decode_steps_took():
    (load,) = sglang_loads(loads(RANK_LOAD), 64).values()
    assert load.gauges == LoadGauges(3, 2, 900, 3)
    assert load.constants == LoadConstants(0, 256, 100)
    prompts, decoded, weighted = [each.work for each in load.timed]
    assert (prompts.prefill_tokens, prompts.busy_s) == (5_000, 0.75)
    assert (decoded.steps, decoded.decode_requests, decoded.busy_s) == (100, 400, 2.0)
    assert (weighted.steps, weighted.decode_requests, weighted.busy_s) == (400, 1_700, 8.1)


def test_an_engine_that_has_not_decoded_yet_is_read():
    for moments in (None, [], [1, 2]):
        (load,) = sglang_loads(loads({**RANK_LOAD, "decode_moments": moments}), 64).values()
        assert [each.work.busy_s for each in load.timed] == [0.75, 0.0, 0.0]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"loads": 1}', b"\xff", loads({**RANK_LOAD, "num_running_reqs": -1})],
)
def test_other_bodies_are_refused(body):
    with pytest.raises(WireError):
        sglang_loads(body, 64)


def test_sglang_without_loads_is_asked_for_metrics():
    engine = PolledEngine("sglang", LIMITS)
    assert engine.path == "/v1/loads?include=core"
    assert set(engine.take(loads(RANK_LOAD, {"dp_rank": 0}), 1.0, 0.1)) == {0, 1}
    engine.refused()
    assert engine.path == "/metrics"
    text = b'sglang:num_running_reqs{dp_rank="1"} 3.0\n'
    (load,) = engine.take(text, 2.0, 0.1).values()
    assert load.gauges.running_requests == 3
    engine.refused()
    assert engine.path == "/v1/loads?include=core"


def test_what_other_readers_need_is_not_read():
    assert PolledEngine("trtllm", LIMITS).path == "/prometheus/metrics"
    assert PolledEngine("vllm", LIMITS).path == "/metrics"


def test_metrics_tell_the_kind_of_an_engine():
    engine = PolledEngine("vllm", LIMITS)
    text = b'trtllm_num_requests_running{model_name="m"} 4.0\n'
    assert engine.take(text, 1.0, 0.1)[0].gauges.running_requests == 4
    with pytest.raises(WireError):
        engine.take(b"process_start_time_seconds 1.0\n", 2.0, 0.1)


def test_registered_sizes_count_where_the_engine_says_none():
    engine = PolledEngine("vllm", LIMITS)
    text = vllm_metrics(block_size=4, num_gpu_blocks=1_000, ranks=(0, 1)).encode()
    found = engine.take(text, 1.0, 0.1)
    assert [found[rank].constants for rank in (0, 1)] == [LoadConstants(2_048, 0, 500)] * 2
    assert found[0].gauges.kv_used_blocks == 250
    assert found[0].timed is not None


def test_lives_are_counted_for_each_rank():
    engine = PolledEngine("sglang", LIMITS)
    restarted = {**RANK_LOAD, "total_prefill_uncached_tokens": 10}
    for body, life in ((RANK_LOAD, 1), (RANK_LOAD, 1), (restarted, 2)):
        engine.take(loads(body, {**RANK_LOAD, "dp_rank": 0}), 1.0, 0.1)
        assert (engine.life(0), engine.life(1)) == (1, life)

from random import Random

import pytest

from router.protocol.loads import LoadCounters
from router.simulator.calibration import CONSTANTS, calibrated
from router.simulator.engine_model import llama_8b, llama_70b


def reports(model, rng, count, noise=0.0):
    """Counters of an engine that behaves as its model says, but for noise on its clock."""
    steps = prefill = requests = resident = 0
    busy_s = contexts = 0.0
    made = [LoadCounters()]
    for _ in range(count):
        d_steps, d_prefill = rng.randint(1, 40), rng.choice([0, rng.randint(1, 9000)])
        d_contexts = d_prefill * rng.uniform(100, 30_000)
        d_requests = rng.randint(0, 800)
        d_resident = d_requests * rng.randint(100, 9000)
        took_s = (
            d_steps * model.base_s
            + d_prefill * model.prefill_token_s
            + d_contexts * model.attention_token2_s
            + d_requests * model.decode_request_s
            + d_resident * model.decode_kv_token_s
        )
        busy_s += took_s * rng.uniform(1 - noise, 1 + noise)
        steps, prefill, contexts = steps + d_steps, prefill + d_prefill, contexts + d_contexts
        requests, resident = requests + d_requests, resident + d_resident
        made.append(LoadCounters(steps, busy_s, prefill, contexts, requests, resident))
    return made


def test_calibration_recovers_the_constants():
    lives = [reports(llama_70b(), Random(seed), 50) for seed in (1, 2)]
    found = calibrated(lives, llama_8b(), 2048, 1_536_000)
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(llama_70b(), name), rel=1e-6)
    assert (found.chunk_tokens, found.capacity_tokens) == (2048, 1_536_000)


def test_a_noisy_clock_moves_them_little():
    found = calibrated([reports(llama_70b(), Random(1), 600, 0.1)], llama_8b(), 1, 1)
    for name in ("base_s", "prefill_token_s", "attention_token2_s"):
        assert getattr(found, name) == pytest.approx(getattr(llama_70b(), name), rel=0.1)


def test_without_reports_the_prior_holds():
    for lives in ([], [[LoadCounters()]], [[LoadCounters()] * 20]):
        found = calibrated(lives, llama_8b(), 8192, 427_000)
        assert found == llama_8b()


def test_unreported_work_has_no_cost():
    """An engine that says steps and prefill tokens alone: two terms, none of them negative."""
    made, busy_s = [LoadCounters()], 0.0
    for i in range(1, 30):
        prefill = (i * i) % 13 * 100
        busy_s += 0.01 + prefill * 1e-4
        tokens = made[-1].prefill_tokens + prefill
        made.append(LoadCounters(steps=i, busy_s=busy_s, prefill_tokens=tokens))
    found = calibrated([made], llama_8b(), 1, 1)
    assert found.base_s == pytest.approx(0.01)
    assert found.prefill_token_s == pytest.approx(1e-4)
    assert found.attention_token2_s == found.decode_kv_token_s == 0

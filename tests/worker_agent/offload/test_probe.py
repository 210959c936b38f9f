"""What was measured of tiers, and what is said about it."""

import pytest

from worker_agent.offload.load_or_recompute import LoadOrRecompute, TierSpeed
from worker_agent.offload.probe import ProbedTier, Recompute, TierProbe, advice

FAST, SLOW = TierProbe(1e9, 8e9, 1e-4), TierProbe(1e9, 1e9, 1e-3)
RECOMPUTE = Recompute(prefill_tokens_per_s=25_000, block_size=16, block_bytes=2 * 2**20)
"""An 8 B model: 3.3 GB/s."""


def test_rates_come_from_times():
    probe = TierProbe.of(1000, 10, [5.0, 7.0, 8.0, 8.25])
    assert (probe.write_bytes_per_s, probe.read_bytes_per_s) == (500.0, 1000.0)
    assert probe.latency_s == pytest.approx(0.15)
    assert TierProbe.of(1000, 10, [5.0, 5.0, 9.0, 9.1]).latency_s == 0.0


def test_healthy_tiers_give_no_advice():
    tiers = [ProbedTier("device", 10), ProbedTier("host", 10, FAST), ProbedTier("disk", 50, FAST)]
    assert advice(tiers) == advice(tiers, RECOMPUTE) == []


def test_a_tier_is_not_smaller_than_the_one_above_it():
    [said] = advice([ProbedTier("device", 10), ProbedTier("host", 9), ProbedTier("disk", 9)])
    assert said.startswith("host: 9 blocks, fewer than device has (10)")


def test_a_tier_slower_than_computing_is_named():
    tiers = [ProbedTier("device", 1), ProbedTier("host", 2, FAST), ProbedTier("disk", 2, SLOW)]
    assert advice(tiers) == []  # nothing was computed yet
    [said] = advice(tiers, RECOMPUTE)
    assert said.startswith("disk: reads 1.00 GB/s, and the engine computes 3.28 GB/s of blocks")


def test_unmeasured_tier_is_named():
    [said] = advice([ProbedTier("device", 1), ProbedTier("disk", 2, None, is_probed=True)])
    assert said.startswith("disk: not measured")


def test_probe_rates_decide_before_the_first_load():
    worth, speed = LoadOrRecompute(block_size=16), TierSpeed(block_bytes=2 * 2**20)
    worth.note_prefill(25_000, 1.0)
    assert worth.prefill_tokens_per_s == 25_000
    assert worth.blocks_to_load(speed, 64) == 64  # an unmeasured tier is tried
    speed.note_probe(SLOW)
    assert worth.blocks_to_load(speed, 64) == 0
    speed = TierSpeed(block_bytes=2 * 2**20)
    speed.note_probe(FAST)
    assert worth.blocks_to_load(speed, 64) == 64

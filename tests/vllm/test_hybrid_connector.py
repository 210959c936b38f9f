"""The connector in a real engine with windows: what it answers is what it would without it."""

import pytest

from support.engines.tiny_hybrids import write_tiny_gemma
from support.vllm.vllm_engines import BLOCK_SIZE, run, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

HOST = {"host_cache_blocks": 256}
NUM_BLOCKS = 240
REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory, vllm_python):
    directory = tmp_path_factory.mktemp("vllm") / "gemma"
    write_tiny_gemma(directory)
    return directory


@pytest.fixture(scope="module")
def right(model):
    """What an engine without the connector answers."""
    return run("plain", model, NUM_BLOCKS)


def test_prompts_that_the_tiers_hold_are_restored(model, record_property):
    extra, seed = {"host_cache_blocks": 4000}, 3
    plain = run("hybrid", model, None, seed, REQUESTS)["asked"]
    found = run("hybrid", model, extra, seed, REQUESTS)
    asked = found["asked"]
    assert [each["tokens"] for each in asked] == [each["tokens"] for each in plain]
    held = held_tokens(asked)
    wanted = [(each["cached"], tokens) for each, tokens in zip(asked, held, strict=True) if tokens]
    restored = sum(cached >= tokens for cached, tokens in wanted)
    record_property("measured", f"hybrid: {restored} of {len(wanted)} prompts restored")
    assert restored >= 0.95 * len(wanted)
    assert len(wanted) >= REQUESTS / 3
    assert found["loaded"] >= sum(tokens for _, tokens in wanted) / 3
    assert found["counts"]["failed_blocks"] == found["counts"]["refused"] == 0


def held_tokens(asked):
    """Of each prompt the tokens before the last boundary that an earlier one left in the tiers:
    its own last one, and the one where it left another.
    """
    boundaries, sequences, held = set(), [], []
    for each in asked:
        prompt = each["prompt"]
        ends = range(0, len(prompt), BLOCK_SIZE)
        best = max(end for end in ends if not end or tuple(prompt[:end]) in boundaries)
        common = max(
            (end for end in ends for known in sequences if known[:end] == prompt[:end]), default=0
        )
        boundaries |= {tuple(prompt[: ends[-1]]), tuple(prompt[: max(best, common)])}
        sequences.append(prompt + each["tokens"])
        held.append(best)
    return held


def test_every_tier_returns_blocks_of_all_groups(model, right, shared, tmp_path):
    disk = {"disk_cache_blocks": 256, "disk_cache_dir": str(tmp_path)}
    found = run("tiers", model, HOST | disk | shared, NUM_BLOCKS)
    other = run("again", model, {"name": "other", **HOST, **shared}, NUM_BLOCKS)
    for name in ("cold", "host", "disk", "remote"):
        assert found[name]["tokens"] == right["tokens"], name
        assert whole_blocks(found[name]) == (name != "cold"), name
    assert found["counts"]["failed_blocks"] == found["counts"]["refused"] == 0
    assert other["tokens"] == right["tokens"]
    assert whole_blocks(other)


def test_a_load_that_fails_ends_in_recomputing(model, right):
    found = run("failing", model, HOST, 2, NUM_BLOCKS)
    for name in ("cold", "failed", "later"):
        assert found[name]["tokens"] == right["tokens"], name
    assert found["failed"]["cached"] == [0] * 4
    assert (found["counts"]["failed_blocks"] > 47, found["wrong"]) == (True, 0)
    assert whole_blocks(found["later"])


def test_aborts_and_preemptions_leak_nothing(model):
    found = run("turmoil", model, {"host_cache_blocks": 60, "disk_cache_blocks": 90}, 1, 100)
    assert found["preemptions"]
    assert found["counts"]["matched_tokens"]
    assert (found["counts"]["refused"], found["differing"]) == (0, 0)

"""The connector in the real engine: what comes from a tier is what would have been computed, what
does not come is computed, and in the end every block is back.

Each engine is one process (`vllm_runs.py`), but the last test's, which is as users start it.
"""

import asyncio

import numpy as np
import pytest

from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.follower.tier_follower import TierFollower
from router.publisher.journal.consolidator import JournalConsolidator
from router.publisher.journal.journal import EventJournal
from support.engines.tiny_llama import write_tiny_llama
from support.processes.servers import eventually, free_port
from support.vllm.vllm_engines import BLOCK_SIZE, VllmEngine, run, whole_blocks
from support.vllm.vllm_stepped import transfer_config
from worker_agent.storage.journal import _HEADER, _RECORD

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

HOST = {"host_cache_blocks": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory, vllm_python):
    directory = tmp_path_factory.mktemp("vllm") / "tiny"
    write_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def right(model):
    """What an engine without the connector answers."""
    return run("plain", model)


@pytest.mark.parametrize("is_layered", [False, True])
def test_loaded_blocks_equal_computed_ones(model, right, shared, tmp_path, is_layered):
    disk = {"disk_cache_blocks": 256, "disk_cache_dir": str(tmp_path)}
    own = {"layer_by_layer": is_layered, "cache_model": f"layered {is_layered}"}
    found = run("tiers", model, HOST | disk | shared | own)
    assert found["held"] == {"HOST": 47, "DISK": 47, "REMOTE": 47}
    for name in ("cold", "host", "disk", "remote"):
        assert found[name]["tokens"] == right["tokens"], name
        assert whole_blocks(found[name]) == (name != "cold"), name
    assert found["counts"]["failed_blocks"] == found["counts"]["refused"] == 0
    assert found["loaded"] == {"HOST": 47, "DISK": 47, "REMOTE": 47}


def test_another_engine_finds_what_one_stored_in_redis(model, right, shared):
    first = run("again", model, {"name": "first", **HOST, **shared})
    second = run("again", model, {"name": "second", **HOST, **shared})
    assert first["tokens"] == second["tokens"] == right["tokens"]
    assert whole_blocks(second)
    assert second["late_looks"] == 0


def test_the_next_life_goes_on_with_what_is_on_disk(model, right, tmp_path):
    disk = {"disk_cache_blocks": 256, "disk_cache_dir": str(tmp_path)}
    assert run("again", model, disk)["tokens"] == right["tokens"]
    found = run("again", model, disk)
    assert found["tokens"] == right["tokens"]
    assert whole_blocks(found)


@pytest.mark.parametrize("first_bad", [0, 2])
def test_a_load_that_fails_ends_in_recomputing(model, right, first_bad):
    found = run("failing", model, HOST, first_bad)
    for name in ("cold", "failed", "later"):
        assert found[name]["tokens"] == right["tokens"], name
    assert found["counts"]["failed_blocks"] == {0: 47, 2: 39}[first_bad]
    assert found["wrong"] == 0
    assert whole_blocks(found["later"])


def test_nothing_computed_in_a_step_with_a_load_error_is_saved(model):
    found = run("poison", model, HOST, True)
    assert found["counts"]["cancelled_stores"] == 1
    assert (found["dirty"], found["kept"]) == (0, 28)
    assert found["recomputed"]
    assert found["loaded"]
    assert found["cached"] == 896


def test_without_protection_the_host_tier_is_poisoned(model):
    """The fault is one: what guards against it is all that keeps the tier clean."""
    found = run("poison", model, HOST, False)
    assert found["recomputed"]
    assert found["dirty"]
    assert not found["loaded"]


@pytest.mark.parametrize("seed", [1, 2])
def test_aborts_and_preemptions_leak_nothing(model, seed):
    found = run("turmoil", model, {"host_cache_blocks": 24, "disk_cache_blocks": 40}, seed)
    assert found["preemptions"]
    assert found["counts"]["matched_tokens"]
    assert found["counts"]["refused"] == 0
    assert found["differing"] == 0


def test_blocks_of_other_weights_are_not_found(model):
    found = run("renamed", model, HOST)
    assert found["at first"] == [0, 0, 0, 160]
    assert found["later"] == [96, 384, 384, 800]


async def test_evicted_blocks_are_loaded_again(model, vllm_python, tmp_path, record_property):
    """Prompts of 60 blocks, of which the engine's memory holds one: each pushes the last one out.
    The agent beside it gets what its tiers hold. Then it is killed, and its next life goes on
    with what is on disk.
    """
    events = f"tcp://127.0.0.1:{free_port()}"
    extra = {"host_cache_blocks": 256, "disk_cache_blocks": 512, "disk_cache_dir": str(tmp_path),
             "tier_events": events}  # fmt: skip
    transfer = transfer_config(extra)
    engine = VllmEngine(vllm_python, model, tmp_path, "connected", transfer=transfer)
    prompts = [
        [2 + (seed * 37 + place * place) % 480 for place in range(1930)] for seed in range(3)
    ]
    engine.start()
    try:
        engine.wait()
        cold = [await engine.complete(prompt, 16) for prompt in prompts]
        warm = [await engine.complete(prompt, 16) for prompt in prompts]
        await eventually(lambda: stored_blocks(tmp_path, 180))
        await reported(events, 180)
        engine.kill()
        engine.start()
        engine.wait()
        next_life = [await engine.complete(prompt, 16) for prompt in prompts]
        hits = await engine.metric("vllm:external_prefix_cache_hits_total")
        loaded = await engine.metric("vllm:kv_router_loaded_blocks_total")
        held = await engine.metric("vllm:kv_router_held_blocks")
    finally:
        engine.kill()
    assert [each.cached_tokens for each in cold] == [0, 0, 0]
    for answers in (warm, next_life):
        assert [each.token_ids for each in answers] == [each.token_ids for each in cold]
        assert [each.cached_tokens for each in answers] == [1920] * 3
    assert hits == 3 * 1920
    assert loaded == 3 * 1920 / BLOCK_SIZE
    assert held == 180  # on disk, from the former life
    record_property(
        "measured", f"cached tokens of 1930: cold 0, evicted 1920, next life {hits / 3}"
    )


async def reported(address, count):
    """A follower of the tiers gets the blocks of each."""
    journal = EventJournal(Rank(7, 0), 1, Identity(SCHEME, BLOCK_SIZE))
    follower = TierFollower(address, JournalConsolidator(journal).source(), 0, lambda _: None)
    task = asyncio.create_task(follower.run())
    try:
        for tier in (Tier.HOST, Tier.DISK):
            await eventually(lambda tier=tier: len(journal.held(tier)) == count)
    finally:
        task.cancel()


async def stored_blocks(directory, count):
    """Whether the journal has `count` blocks on disk."""
    [journal] = directory.glob("*.journal")
    records = np.frombuffer(journal.read_bytes(), dtype=_RECORD, offset=_HEADER.size)
    return np.count_nonzero(records["has"]) == count

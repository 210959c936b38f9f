"""What the engine says does not depend on where its blocks have been."""

import threading
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from router.protocol.values import Tier
from support.blocks.tier_stacks import disk, host, remote
from support.blocks.tiered_rank import BLOCK_BYTES, TEXT, TieredRank, cold
from worker_agent.layout.orders import OPERATIONAL_HND, OPERATIONAL_NHD, UNIVERSAL_TP, InnerShape
from worker_agent.layout.strides import LayoutKind
from worker_agent.reference.engine.batching import GenerationRequest
from worker_agent.reference.engine.cache import CacheLayout


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PAGES = InnerShape.NHD, InnerShape.HND
LAYOUTS = [
    CacheLayout(kind, PAGES[number % 2], kept)
    for number, (kind, kept) in enumerate(
        product(LayoutKind, (OPERATIONAL_NHD, OPERATIONAL_HND, UNIVERSAL_TP))
    )
] + [CacheLayout.kept_as_computed(LayoutKind.CONTIGUOUS, page) for page in PAGES]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.kind}-{x.page}-{x.kept.dims[0]}")
def test_blocks_from_host_and_disk_equal_computed_ones(tmp_path, layout):
    stores = host(tmp_path, 30, BLOCK_BYTES), disk(tmp_path, 100, BLOCK_BYTES)
    with TieredRank(*stores, layout=layout) as rank:
        first = rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        assert rank.run(TEXT[:200]) == first == cold(TEXT[:200])
        assert rank.cached_tokens == 192
        assert all(status.up.blocks for status in rank.stack.status())


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS[::4], ids=lambda x: f"{x.kind}-{x.page}")
def test_blocks_from_every_tier_equal_computed_ones(tmp_path, redis_port, layout):
    stores = (
        host(tmp_path, 28, BLOCK_BYTES), disk(tmp_path, 32, BLOCK_BYTES),
        remote(redis_port, BLOCK_BYTES),
    )  # fmt: skip
    with TieredRank(*stores, layout=layout) as rank:
        first = rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        assert rank.run(TEXT[:200]) == first == cold(TEXT[:200])
        assert rank.cached_tokens == 192
        assert all(status.up.blocks for status in rank.stack.status())
    with TieredRank(remote(redis_port, BLOCK_BYTES), layout=layout, first=Tier.REMOTE) as other:
        assert other.run(TEXT[:200]) == first
        assert other.cached_tokens == 192


def test_waiting_tokens_exclude_blocks_in_tiers(tmp_path):
    stores = host(tmp_path, 30, BLOCK_BYTES), disk(tmp_path, 100, BLOCK_BYTES)
    with TieredRank(*stores) as rank:
        rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        rank.step(added=[GenerationRequest("large", TEXT[5:305], 60)])
        gauges = rank.step(added=[GenerationRequest("x", TEXT[:200], 1)]).gauges
        assert (gauges.waiting_requests, gauges.waiting_uncached_tokens) == (1, 200 - 192)


def test_blocks_in_device_use_are_kept_in_tiers(tmp_path):
    with TieredRank(host(tmp_path, 12, BLOCK_BYTES)) as rank:
        rank.run(TEXT[:100])
        rank.settle()
        first = set(rank.told[Tier.HOST])
        for begin in (1, 0, 2):  # the second, the first again, and one for which there is no room
            rank.run(TEXT[begin : begin + 100])
            rank.settle()
        assert len(first) == 6
        assert first < rank.told[Tier.HOST]


@pytest.mark.parametrize(("priority", "is_kept"), [(0, False), (9, True)])
def test_blocks_of_high_priority_are_kept_longest(tmp_path, priority, is_kept):
    with TieredRank(host(tmp_path, 12, BLOCK_BYTES)) as rank:
        rank.run(TEXT[:100], priority=priority)
        rank.settle()
        first = set(rank.told[Tier.HOST])
        rank.fill()
        assert len(first) == 6
        assert (first < rank.told[Tier.HOST]) == is_kept


def test_published_blocks_equal_held_blocks(tmp_path):
    stores = host(tmp_path, 16, BLOCK_BYTES), disk(tmp_path, 30, BLOCK_BYTES)
    with TieredRank(*stores) as rank:
        for number in range(4):
            rank.run(TEXT[number : 200 + number], max_tokens=20)
        rank.settle()
        assert len(rank.told[Tier.HOST]) == 16
        assert len(rank.told[Tier.DISK]) == 30
        for tier, store in zip((Tier.HOST, Tier.DISK), stores, strict=True):
            named = [store.pool.name(block) for block in range(store.num_blocks)]
            assert rank.told[tier] == {name.sequence_hash for name in named if name is not None}
        rank.step(clear_cache=True)
        rank.settle()
        rank.run(TEXT[:50])
        assert rank.cached_tokens == 0
        rank.settle()
        assert rank.told[Tier.DISK] == rank.told[Tier.HOST] == rank.told[Tier.DEVICE]


@contextmanager
def stuck(rank, tier):
    """A tier that does nothing."""
    free, is_stuck = threading.Event(), threading.Event()

    def stick(_):
        is_stuck.set()
        free.wait(60)

    rank.stack.call(tier, stick)
    assert is_stuck.wait(60)
    yield
    free.set()


def test_others_compute_while_one_waits_for_its_blocks(tmp_path):
    with TieredRank(host(tmp_path, 100, BLOCK_BYTES)) as rank:
        first = rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        with stuck(rank, Tier.HOST):
            output = rank.step(added=[GenerationRequest("waits", TEXT[:200], 8)])
            assert (output.generated, output.has_work) == ([], False)
            assert output.wait_s > 50.0
            assert len(rank.run(list(b"another prompt"), request_id="other")) == 8
        tokens = []
        while len(tokens) < 8:
            if not output.has_work:
                rank.wait(output)
            output = rank.step()
            tokens += [generated.token for generated in output.generated]
        assert tokens == first


def test_late_blocks_are_computed(tmp_path):
    with TieredRank(host(tmp_path, 100, BLOCK_BYTES), timeout_s=0.05) as rank:
        first = rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        with stuck(rank, Tier.HOST):
            assert rank.run(TEXT[:200]) == first
            assert rank.cached_tokens == 0
        rank.settle()


def test_request_cancelled_during_onboarding_leaves_no_blocks(tmp_path):
    with TieredRank(host(tmp_path, 100, BLOCK_BYTES)) as rank:
        rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        with stuck(rank, Tier.HOST):
            output = rank.step(added=[GenerationRequest("leaves", TEXT[:200], 8)])
            assert output.gauges.kv_used_blocks > 0
            output = rank.step(aborted=["leaves"])
            assert (output.gauges.kv_used_blocks, output.has_work) == (0, False)
            other = rank.step(added=[GenerationRequest("stays", TEXT[100:300], 8)])
        tokens = []
        while len(tokens) < 8:
            tokens += [generated.token for generated in other.generated]
            other = rank.step()
        assert tokens == cold(TEXT[100:300])
        rank.settle()
        assert rank.step().gauges.kv_used_blocks == 0


def flipped(path):
    """Every byte of a file."""
    data = path.read_bytes()
    with path.open("r+b") as file:  # in place: it is mapped
        file.write(bytes(byte ^ 4 for byte in data))


def test_wrong_bytes_in_every_tier_are_wrong_tokens_nowhere(tmp_path):
    stores = host(tmp_path, 16, BLOCK_BYTES), disk(tmp_path, 100, BLOCK_BYTES)
    with TieredRank(*stores) as rank:
        first = rank.run(TEXT[:200])
        rank.settle()
        rank.fill()
        flipped(tmp_path / "host")
        flipped(tmp_path / "disk")
        assert rank.run(TEXT[:200]) == first
        assert rank.cached_tokens == 0
        assert any(status.store.corrupt for status in rank.stack.status())
        while rank.cached_tokens < 192:  # each time some of the wrong ones are found
            rank.settle()
            rank.fill()
            assert rank.run(TEXT[:200]) == first

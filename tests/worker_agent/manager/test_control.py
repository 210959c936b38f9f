"""Control of tiers without an agent: several ranks, keyed names, tiers that are late or broken."""

import threading
from contextlib import ExitStack

import pytest
import torch

from router.errors import InvalidFieldError
from router.protocol.values import Tier
from router.runtime.kernels.hash_key import derive
from router.sequence.hashing.keyed_hashes import HashKeying
from worker_agent.blocks.names import BlockName, CacheLevel
from worker_agent.manager import control
from worker_agent.manager.config import (
    BlockManagerConfig,
    CacheModel,
    OnDevice,
    OnHost,
    RuntimeConfig,
    TierLayout,
)
from worker_agent.manager.control import ControlledRank, TierControl
from worker_agent.manager.manager import KvBlockManager
from worker_agent.operations.messages import ResetAll, ResetBlocks, ResetPool, StatusQuery
from worker_agent.storage.errors import StorageError

G1, G2, G3, G4 = CacheLevel
CONFIG = BlockManagerConfig(
    runtime=RuntimeConfig(worker_id=7),
    model=CacheModel(num_layers=1, page_size=4, inner_dim=8),
    device=TierLayout(num_blocks=4, place=OnDevice()),
    host=TierLayout(num_blocks=8, place=OnHost(is_pinned=False)),
)
NAME = BlockName(b"n" * 16, 12)


@pytest.fixture
def ranks():
    with ExitStack() as stack:
        managers = [stack.enter_context(KvBlockManager(CONFIG)) for _ in range(2)]
        woken = []
        yield {
            number: ControlledRank(manager, lambda number=number: woken.append(number))
            for number, manager in enumerate(managers)
        }


def control_of(ranks, naming=None):
    return TierControl(7, naming or HashKeying(), ranks)


def stored(rank):
    """The host holds a block; only its own thread stores."""
    rows = torch.zeros((1, rank.manager.block_bytes), dtype=torch.uint8)
    rank.manager.stack.call(Tier.HOST, lambda tier: tier.store([NAME], rows)).result(60)


async def test_operations_apply_to_one_rank_or_all(ranks):
    for rank in ranks.values():
        stored(rank)
    of = control_of(ranks)
    reported = await of.answer(ResetBlocks(level=G2, sequence_hashes=[12], dp_rank=1))
    assert [(each.dp_rank, each.reset_blocks) for each in reported.ranks] == [(1, [12])]
    left = of.status(StatusQuery(level=G2, hashes=True)).tiers
    assert [each.inactive_hashes for each in left] == [[12], []]
    reset = await of.answer(ResetAll())
    assert [each.dp_rank for each in reset.ranks] == [0, 1]
    assert all(each.reset == [G1, G2] for each in reset.ranks)
    with pytest.raises(InvalidFieldError, match=r"dp_rank: 2 \(allowed: 0, 1\)"):
        await of.answer(ResetAll(dp_rank=2))
    with pytest.raises(InvalidFieldError, match=r"G3 is not configured \(allowed: G1, G2\)"):
        await of.answer(ResetPool(level=G3))


async def test_blocks_go_by_the_names_that_routers_know(ranks):
    stored(ranks[0])
    naming = HashKeying(derive(b"s" * 32))
    of = control_of(ranks, naming)
    on_bus = naming.name(12)
    [host] = of.status(StatusQuery(level=G2, hashes=True, dp_rank=0)).tiers
    assert host.inactive_hashes == [on_bus]
    reported = await of.answer(ResetBlocks(level=G2, sequence_hashes=[12, on_bus], dp_rank=0))
    assert (reported.ranks[0].reset_blocks, reported.ranks[0].not_found) == ([on_bus], [12])


async def test_late_tier_is_reported(ranks, monkeypatch):
    monkeypatch.setattr(control, "TIMEOUT_S", 0.2)
    can_go_on = threading.Event()
    ranks[0].manager.stack.call(Tier.HOST, lambda _: can_go_on.wait(60))
    ranks[0].manager.stack.call(Tier.HOST, lambda _: None).cancel()
    reset = await control_of(ranks).answer(ResetPool(level=G2, dp_rank=0))
    assert "no response" in reset.ranks[0].failed[G2]
    can_go_on.set()
    stored(ranks[0])  # the tier goes on, although no caller waits for its answer


async def test_broken_tier_is_reported(ranks):
    def fail(_):
        raise OSError

    with pytest.raises(StorageError, match="broken"):
        ranks[0].manager.stack.call(Tier.HOST, fail).result(60)
    of = control_of(ranks)
    [host] = of.status(StatusQuery(level=G2, dp_rank=0)).tiers
    assert host.traffic.is_broken
    with pytest.raises(StorageError, match="closed, broken or too busy"):
        await of.answer(ResetBlocks(level=G2, sequence_hashes=[12], dp_rank=0))

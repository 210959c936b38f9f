"""Which policy a core asks, and what it makes of the answer."""

import numpy as np
import pytest

from router.errors import ConfigError, InvalidFieldError
from router.protocol.requests import ConfigOverride
from router.scheduler.selector import Policy
from router.scheduler.terms import OVERLAP_DEVICE
from support.values.builders import World, rank

PROMPT = list(range(40))


@pytest.fixture
def world():
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    return world


def test_a_request_may_want_another_policy(world):
    world.cache(rank(2), PROMPT)
    turns = ConfigOverride(policy="round-robin")
    chosen = [world.select(PROMPT, router_config_override=turns) for _ in range(4)]
    assert [each.rank for each in chosen] == [rank(1), rank(2), rank(3), rank(1)]
    assert [each.choice.policy for each in chosen] == ["round-robin"] * 4
    assert world.select(PROMPT).rank == rank(2)


def test_a_routing_group_may_have_a_policy_of_its_own():
    world = World(default_policy="lmetric", group_policies={"chat": "least-loaded"})
    world.worker(1)
    world.worker(2, routing_group="chat")
    assert world.select(PROMPT).choice.policy == "lmetric"
    assert world.select(PROMPT, routing_group="chat").choice.policy == "least-loaded"


def test_unknown_policy_is_refused_and_books_nothing(world):
    nobody = ConfigOverride(policy="of nobody")
    with pytest.raises(InvalidFieldError, match=r"allowed: cache-aware, dynamo-1\.0, dynamo-1\.6"):
        world.book("x", PROMPT, router_config_override=nobody)
    assert len(world.core.tracker) == 0


def test_unknown_default_policy_is_refused_at_start():
    with pytest.raises(ConfigError, match="policy: 'of nobody' is not known"):
        World(default_policy="of nobody")


class Farthest(Policy):
    """The last one of those that hold anything."""

    name = "farthest"

    def filter(self, table, settings):
        return table.column(OVERLAP_DEVICE) > 0

    def score(self, table, settings):
        return -np.arange(len(table), dtype=float)


def test_any_selector_may_choose():
    world = World(selectors=[Farthest()], default_policy="farthest")
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    for worker_id in (2, 1):
        world.cache(rank(worker_id), PROMPT)
    placement, _ = world.book("x", PROMPT)
    assert (placement.rank, placement.worker.worker_id) == (rank(2), 2)
    assert [each.worker_id for each in placement.choice.table.ranks] == [1, 2]
    assert world.core.tracker.active(rank(2)).active_requests == 1


def test_a_prompt_waits_for_its_prefix_where_that_is_sooner_than_to_compute_it():
    world = World(default_policy="predictive")
    for worker_id in (1, 2):
        world.worker(worker_id)
    long = list(range(40_000))
    first, _ = world.book("first", long)
    assert world.select([*long, 1, 2, 3], now_s=0.0).rank != first.rank
    assert world.select([*long, 1, 2, 3], now_s=2.0).rank == first.rank
    assert world.select([9, *long], now_s=2.0).rank != first.rank

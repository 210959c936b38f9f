"""Which policy a core asks, and what it makes of the answer."""

import numpy as np
import pytest
from msgspec.structs import replace

from router.core.commands import Reconfigure
from router.core.errors import TooManyReservationsError
from router.errors import ConfigError, InvalidFieldError
from router.protocol.requests import ConfigOverride
from router.scheduler.queue.waiting_room import Queueing
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings, TrustWeights
from router.scheduler.terms import OVERLAP_DEVICE
from router.sequence.rank_table import TRUST_WEIGHT
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


def reconfigure(world, **changes):
    return world.core.handle(Reconfigure.of(replace(world.core.settings, **changes)), 0.0)


def test_a_changed_policy_and_its_weights_apply_to_the_next_request(world):
    world.cache(rank(2), PROMPT)
    assert world.select(PROMPT).rank == rank(2)
    reconfigure(world, default_policy="round-robin", group_policies={"chat": "lmetric"})
    assert [world.select(PROMPT).rank for _ in range(3)] == [rank(1), rank(2), rank(3)]
    assert world.core.settings.default_policy == "round-robin"
    world.worker(4, routing_group="chat")
    assert world.select(PROMPT, routing_group="chat").choice.policy == "lmetric"

    reconfigure(world, default_policy="dynamo-1.0")
    before = world.select(PROMPT).choice.costs
    reconfigure(world, policy=PolicySettings(prefill_load_scale=3.0))
    assert (world.select(PROMPT).choice.costs != before).any()


def test_changed_weights_of_trust_apply_to_every_rank_at_once(world):
    weights = TrustWeights(exact=0.25)
    reconfigure(world, policy=PolicySettings(trust_weights=weights))
    assert world.core.trust_weights == weights
    rows = [world.core.ranks.row(rank(worker_id)) for worker_id in (1, 2, 3)]
    assert [row[TRUST_WEIGHT] for row in rows] == [0.25] * 3


def test_a_changed_limit_of_bookings_applies_to_the_next_one(world):
    world.book("a", PROMPT)
    reconfigure(world, max_reservations=1)
    with pytest.raises(TooManyReservationsError):
        world.book("b", PROMPT)
    reconfigure(world, max_reservations=2)
    world.book("b", PROMPT)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"default_policy": "of nobody"}, "policy: 'of nobody' is not known"),
        ({"group_policies": {"chat": "of nobody"}}, "group_policies: 'of nobody' is not known"),
        ({"queueing": Queueing(policy_file="{")}, "router_policy_config"),
    ],
)
def test_an_unusable_change_changes_nothing(world, wrong, said):
    before = world.core.settings
    with pytest.raises(ConfigError, match=said):
        reconfigure(world, **{"default_policy": "random", "max_reservations": 1, **wrong})
    assert world.core.settings == before
    assert world.select(PROMPT).choice.policy == "dynamo-1.0"

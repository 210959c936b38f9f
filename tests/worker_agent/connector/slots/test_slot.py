"""A slot: what it loads, what it stores, and what is left of it."""

import pytest

from router.errors import InvalidFieldError
from router.protocol.values import Tier
from router.sequence.hashing.tokens import salt_hash
from support.blocks.connectors import (
    NAMING,
    groups_of,
    in_state,
    keep,
    lower_tiers,
    manager_over,
    names_of,
    one_group,
    settle_all,
)
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.pool import BlockPool
from worker_agent.connector.slots.errors import (
    SlotNotFoundError,
    SlotOperationError,
    SlotPoolError,
    SlotStateError,
)
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.protocol import Completion, IterationComplete, RequestType
from worker_agent.connector.slots.slot_manager import SlotManager
from worker_agent.connector.slots.slot_table import SlotState
from worker_agent.storage.errors import StorageError

PROMPT = list(range(100, 118))  # four blocks, and two tokens
NAMES = names_of(PROMPT)


@pytest.fixture
def tiers():
    """The host has the first block, the disk the next two."""
    tiers = lower_tiers()
    keep(tiers[0].pool, NAMES[:1])
    keep(tiers[1].pool, NAMES[1:3])
    return tiers


def onboarding(tiers, tokens=PROMPT, computed=0):
    """A slot whose loads the worker got."""
    manager = manager_over(tiers)
    slot = manager.create_slot("r", tokens)
    slot.acquire_all_local_matches(computed)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.mark_as_onboarding(3, 100.0)
    return manager, slot


def test_blocks_are_held_tier_by_tier_until_they_are_loaded(tiers):
    _, slot = onboarding(tiers)
    assert (slot.staged_tokens, slot.onboarding_iteration) == (12, 3)
    assert [each.pool.used_blocks for each in tiers] == [1, 2]
    loads = slot.take_pending_operations()
    assert [(each.tier, each.blocks) for each in loads] == [(Tier.HOST, (7,)), (Tier.DISK, (8, 9))]
    assert [each.names for each in loads] == [tuple(NAMES[:1]), tuple(NAMES[1:3])]
    assert {each.request_type for each in loads} == {RequestType.IMMEDIATE}
    assert slot.take_pending_operations() == []
    assert slot.settle(Completion(loads[1].uuid))
    with pytest.raises(SlotStateError, match="loads are under way"):
        slot.mark_as_prefilling(4)
    assert slot.settle(Completion(loads[0].uuid))
    assert [each.pool.used_blocks for each in tiers] == [0, 0]
    slot.mark_as_prefilling(4)
    assert (slot.computed_tokens, slot.failed_blocks) == (12, ())


def test_matching_starts_after_the_engines_own_blocks(tiers):
    keep(tiers[0].pool, NAMES[1:2])
    manager = manager_over(tiers)
    slot = manager.create_slot(1, PROMPT)
    slot.acquire_all_local_matches(4)
    assert slot.staged_tokens == 8
    slot.append_mutable_device_blocks([[7, 8, 9]])
    slot.mark_as_onboarding(1, 0.0)
    settle_all(slot)
    slot.mark_as_prefilling(2)
    assert slot.computed_tokens == 12


def test_a_token_is_always_left_to_compute(tiers):
    _, slot = onboarding(tiers, tokens=PROMPT[:12])
    assert [load.tier for load in slot.take_pending_operations()] == [Tier.HOST, Tier.DISK]
    assert slot.staged_tokens == 8
    slot = manager_over(tiers).create_slot("s", PROMPT[:4])
    slot.acquire_all_local_matches(0)
    assert slot.state is SlotState.INITIALIZED
    assert [each.pool.used_blocks for each in tiers] == [1, 1]


@pytest.mark.parametrize(
    ("errors", "computed", "failed"),
    [({0: {0: "io"}}, 0, (7,)), ({1: {1: "io"}}, 8, (9,)), ({1: {0: "a", 1: "b"}}, 4, (8, 9))],
)
def test_credit_ends_at_the_first_failed_block(tiers, errors, computed, failed):
    _, slot = onboarding(tiers)
    for place, load in enumerate(slot.take_pending_operations()):
        slot.settle(Completion(load.uuid, errors.get(place, {})))
    assert slot.failed_blocks == failed
    slot.mark_as_prefilling(4)
    assert slot.computed_tokens == computed


def test_errors_of_blocks_that_were_not_asked_for_discredit_all(tiers):
    _, slot = onboarding(tiers)
    for load in slot.take_pending_operations():
        slot.settle(Completion(load.uuid, {2: "io"} if load.tier is Tier.DISK else {}))
    assert slot.failed_blocks == (8, 9)


def test_full_blocks_are_stored_once_after_their_iteration(tiers):
    slot = manager_over(tiers).create_slot("r", PROMPT)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.schedule(1, 0, 9)
    [store] = slot.take_pending_operations()
    assert (store.kind, store.request_type, store.tier) == ("store", "scheduled", Tier.HOST)
    assert (store.names, store.blocks) == (tuple(NAMES[:2]), (7, 8))
    assert store.requirement == IterationComplete(1)
    slot.schedule(2, 9, 9)
    slot.schedule(3, 18, 1, [1])
    assert slot.state is SlotState.DECODING
    slot.schedule(4, 19, 1, [2])
    blocks = [store.blocks for store in slot.take_pending_operations()]
    assert blocks == [(9, 10), (11,)]


def test_blocks_of_others_or_without_hashes_are_not_stored(tiers):
    slot = manager_over(tiers).create_slot("r", PROMPT)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.schedule(1, 8, 10)
    slot.schedule(2, 18, 2)  # tokens that are not sampled yet
    assert [store.blocks for store in slot.take_pending_operations()] == [(9, 10)]
    assert slot.computed_tokens == 18
    slot.schedule(3, 20, 0, [1, 2])
    assert [store.blocks for store in slot.take_pending_operations()] == [(11,)]


def test_recomputed_blocks_are_stored_again(tiers):
    slot = manager_over(tiers).create_slot("r", PROMPT)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.schedule(1, 0, 12)
    slot.take_pending_operations()
    slot.schedule(2, 4, 4)
    assert [store.blocks for store in slot.take_pending_operations()] == [(8,)]


def test_nothing_is_moved_without_lower_tiers():
    slot = manager_over().create_slot("r", PROMPT)
    slot.acquire_all_local_matches(0)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.schedule(1, 0, 18)
    assert slot.take_pending_operations() == []


def test_preempted_slot_restarts_and_voids_its_stores(tiers):
    slot = manager_over(tiers).create_slot("r", PROMPT)
    slot.append_mutable_device_blocks([[7, 8, 9, 10, 11]])
    slot.schedule(1, 0, 18)
    [store] = slot.take_pending_operations()
    slot.schedule(2, 18, 1, [1])
    assert slot.preempt(3) == [store.uuid]
    assert (slot.state, slot.computed_tokens) == (SlotState.INITIALIZED, 0)
    assert slot.is_settled
    assert not slot.settle(Completion(store.uuid))
    slot.acquire_all_local_matches(0)
    assert slot.staged_tokens == 12
    slot.append_mutable_device_blocks([[3, 4, 5, 6, 7]])
    slot.schedule(4, 0, 19)  # the engine does not want what is staged
    assert [each.pool.used_blocks for each in tiers] == [0, 0]
    assert [len(store.blocks) for store in slot.take_pending_operations()] == [4]


def test_completions_doubled_and_of_others_change_nothing(tiers):
    manager, slot = onboarding(tiers)
    [first, second] = slot.take_pending_operations()
    assert manager.settle("r", Completion(first.uuid))
    assert not manager.settle("r", Completion(first.uuid, {0: "io"}))
    assert not manager.settle("r", Completion(999))
    assert not manager.settle("nobody", Completion(second.uuid))
    assert manager.settle("r", Completion(second.uuid))
    assert slot.failed_blocks == ()


def test_finish_before_dispatch_loads_nothing(tiers):
    _, slot = onboarding(tiers)
    slot.mark_as_finished(4, 0.0)
    slot.mark_as_finished(4, 0.0)
    assert slot.state is SlotState.FINISHED
    assert slot.take_pending_operations() == []
    assert [each.pool.used_blocks for each in tiers] == [0, 0]


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_lost_completion_is_waited_for_until_the_deadline(tiers, is_finished):
    manager, slot = onboarding(tiers)
    [first, second] = slot.take_pending_operations()
    slot.settle(Completion(first.uuid))
    if is_finished:
        slot.mark_as_finished(4, 101.0)
    assert manager.expire(129.9) == []
    assert manager.expire(131.0) == [slot]
    assert manager.expire(200.0) == []
    assert len(manager.quarantine) == 2
    assert [each.pool.used_blocks for each in tiers] == [0, 0]
    if not is_finished:
        assert slot.failed_blocks == (8, 9)
        slot.mark_as_prefilling(5)
        assert slot.computed_tokens == 4
        slot.mark_as_finished(6, 140.0)
    assert slot.state is SlotState.FINISHED
    assert manager.settle("r", Completion(second.uuid))
    assert not manager.settle("r", Completion(second.uuid))
    assert (len(manager.quarantine), manager.quarantine.released_blocks) == (0, 2)


def test_lost_worker_releases_quarantined_blocks(tiers):
    manager, slot = onboarding(tiers)
    slot.take_pending_operations()
    manager.remove_slot("r", is_forced=True)
    assert not manager.has_slot("r")
    assert manager.quarantine.keys() == {"r"}
    assert len(manager.quarantine) == 3
    manager.quarantine.release_all()
    assert (len(manager.quarantine), manager.quarantine.released_blocks) == (0, 3)


def test_slots_are_shared_and_removed_once_they_are_finished():
    manager = manager_over()
    slot = manager.create_slot("1", PROMPT)
    other = manager.create_slot(1, PROMPT)
    assert manager.get_slot("1") is slot
    assert manager.get_slot(1) is other
    with pytest.raises(SlotStateError, match="slot 1: remove while Initialized"):
        manager.remove_slot("1")
    slot.mark_as_finished(1, 0.0)
    manager.remove_slot("1")
    assert (manager.has_slot("1"), manager.has_slot(1)) == (False, True)
    for lost in (manager.get_slot, manager.remove_slot):
        with pytest.raises(SlotNotFoundError, match="slot 1 not found"):
            lost("1")


@pytest.mark.parametrize(
    ("key", "tokens", "options", "said"),
    [
        ("r", [1], {}, "key: it has a slot"),
        ("s", [], {}, "tokens: none"),
        ("s", [1, -1], {}, "tokens: -1"),
        ("s", [1], {"salt_hash": 5}, "salt_hash: 5"),
        (-1, [1], {}, "key: -1"),
        (True, [1], {}, "key: True"),
    ],
)
def test_slots_that_cannot_be_created(key, tokens, options, said):
    manager = manager_over()
    manager.create_slot("r", [1])
    with pytest.raises(SlotOperationError, match=said):
        manager.create_slot(key, tokens, **options)
    assert len(manager) == 1


def test_tenants_do_not_share_blocks(tiers):
    manager = manager_over(tiers)
    salt = salt_hash(None, "tenant")
    slot = manager.create_slot("r", PROMPT, salt, cache_salt="tenant")
    slot.acquire_all_local_matches(0)
    assert slot.staged_tokens == 0


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda slot: slot.acquire_all_local_matches(3), "num_computed_tokens: 3"),
        (lambda slot: slot.acquire_all_local_matches(12), "num_computed_tokens: 12"),
        (lambda slot: slot.advance_computed_position(11), r"num_tokens: 11 \(allowed: 0 to 10\)"),
        (lambda slot: slot.advance_computed_position(-1), "num_tokens: -1"),
        (lambda slot: slot.append_mutable_device_blocks([[1, 2, 1]]), "blocks: one of them twice"),
        (lambda slot: slot.append_mutable_device_blocks([[1, -2]]), "blocks: -2"),
        (lambda slot: slot.schedule(1, 0, 5), "num_scheduled: 0 to 5"),
        (lambda slot: slot.schedule(1, -1, 1), "num_scheduled: -1 to 0"),
        (lambda slot: slot.schedule(1, 0, 0, [-1]), "tokens: -1"),
    ],
)
def test_transitions_not_in_the_table_are_refused(act, said):
    slot = in_state(manager_over(), SlotState.INITIALIZED)
    with pytest.raises(SlotOperationError, match=said):
        act(slot)
    assert slot.state is SlotState.INITIALIZED


def test_repeated_device_blocks_are_refused():
    slot = in_state(manager_over(), SlotState.PREFILLING)
    slot.append_mutable_device_blocks([[]])
    with pytest.raises(SlotOperationError, match="one of them twice"):
        slot.append_mutable_device_blocks([[13, 10]])
    assert slot.device_blocks == [[10, 11, 12]]


class GonePool(BlockPool):
    """One that cannot look."""

    __slots__ = ()

    def match(self, identities):
        raise StorageError("disk", "gone", "a disk that works")


def test_pool_errors_are_passed_on():
    tiers = [*lower_tiers()[:1], LowerTier(Tier.DISK, GonePool(4, LruEviction()))]
    keep(tiers[0].pool, NAMES[:1])
    slot = manager_over(tiers).create_slot("r", PROMPT)
    with pytest.raises(SlotPoolError, match="disk: gone"):
        slot.acquire_all_local_matches(0)
    assert tiers[0].pool.used_blocks == 0


def test_loading_needs_device_blocks(tiers):
    slot = manager_over(tiers).create_slot("r", PROMPT)
    slot.acquire_all_local_matches(0)
    slot.append_mutable_device_blocks([[1, 2]])
    with pytest.raises(SlotOperationError, match=r"device_blocks: 2 \(allowed: at least 3\)"):
        slot.mark_as_onboarding(1, 0.0)
    assert slot.state is SlotState.ONBOARD_STAGED


def test_settings_are_checked():
    with pytest.raises(InvalidFieldError, match="block_size: 0"):
        one_group(0)
    with pytest.raises(InvalidFieldError, match="deadline_s: nan"):
        SlotManager(one_group(4), NAMING, deadline_s=float("nan"))


def test_blocks_that_a_window_has_passed_are_not_stored():
    """The tokens come late, as where steps overlap: then the engine may use the block again."""
    groups = groups_of([(4, None), (4, 5)])
    slot = SlotManager(groups, NAMING, lower_tiers()).create_slot("r", PROMPT[:10])
    slot.append_mutable_device_blocks([[1, 2, 3, 4], [5, 6, 7, 8]])
    slot.schedule(1, 0, 4)
    slot.schedule(2, 12, 1)
    stores = slot.take_pending_operations()
    assert [(store.blocks, store.is_urgent) for store in stores] == [((1,), False), ((2,), False)]
    slot.schedule(3, 4, 6)  # The engine computes them again.
    assert [store.blocks for store in slot.take_pending_operations()] == [(2,), (6,)]


def test_blocks_of_other_numbers_of_groups_are_refused():
    slot = in_state(manager_over(), SlotState.INITIALIZED)
    with pytest.raises(SlotOperationError, match=r"blocks: of 2 groups \(allowed: 1\)"):
        slot.append_mutable_device_blocks([[1], [2]])


def test_engine_s_table_may_lack_what_a_window_has_passed():
    groups = groups_of([(4, None), (4, 5)])
    slot = SlotManager(groups, NAMING).create_slot("r", PROMPT)
    slot.extend_device_blocks([[1, 2], [5, 6]])
    slot.extend_device_blocks([[1, 2, 3], [0, 6, 7]])
    assert slot.device_blocks == [[1, 2, 3], [0, 6, 7]]
    with pytest.raises(SlotOperationError, match=r"blocks: \[9, 2, 3\]"):
        slot.extend_device_blocks([[9, 2, 3], [0, 6, 7]])
    slot.forget_passed(13)
    slot.append_mutable_device_blocks([[6], []])  # The same request's again, for other tokens.
    assert slot.device_blocks == [[1, 2, 3, 6], [0, 0, 7]]

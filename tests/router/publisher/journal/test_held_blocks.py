"""What a rank holds, and its holes, against brute force and against the definition in dicts."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oracle.held import HeldBlocks as HeldInDicts
from router.protocol.values import FASTEST_TIER, TIERS, U64_MAX, HeldState, Tier
from router.publisher.journal.held_blocks import DEFAULT_MULTIPLIER, HeldBlocks
from router.runtime.kernels import reserved_memory
from support.chaos.fuzzing import examples


def test_fastest_tier_of_a_mask():
    assert [FASTEST_TIER[mask] for mask in (0b0000, 0b0001, 0b1000, 0b1010)] == [4, 0, 3, 1]


def test_starts_with_nothing():
    assert HeldBlocks().state() == HeldState()
    assert HeldBlocks().held(Tier.DEVICE).tolist() == []


def test_a_removed_parent_leaves_a_hole_in_every_tier():
    held = HeldBlocks()
    held.store(Tier.DEVICE, [1, 2, 3], None)
    held.remove(Tier.DEVICE, [2])
    assert held.state().holes == (1, 1, 1, 1)
    held.store(Tier.DEVICE, [2], 1)
    assert held.state().holes == (0, 0, 0, 0)


def test_a_parent_in_a_slower_tier_leaves_a_hole_in_the_faster_only():
    held = HeldBlocks()
    held.store(Tier.DEVICE, [1, 2], None)
    held.store(Tier.HOST, [1], None)
    held.remove(Tier.DEVICE, [1])
    assert held.state().holes == (1, 0, 0, 0)


def test_every_child_of_a_removed_parent_is_a_hole():
    held = HeldBlocks()
    held.store(Tier.DEVICE, [1, 2], None)
    held.store(Tier.DEVICE, [3], 1)
    held.remove(Tier.DEVICE, [1])
    assert held.state().holes == (2, 2, 2, 2)


def test_changes_are_returned():
    held = HeldBlocks()
    assert held.store(Tier.DEVICE, [1, 2], None).tolist() == [1, 2]
    assert held.store(Tier.DEVICE, [1, 2, 3], None).tolist() == [3]
    assert held.remove(Tier.DEVICE, [3, 4, 3]).tolist() == [3]
    assert held.store(Tier.DEVICE, [], 1).tolist() == []
    assert held.remove(Tier.DEVICE, []).tolist() == []


def test_the_state_carries_doubts():
    assert HeldBlocks().state(5).doubts == 5


def test_every_64_bit_number_names_a_block():
    held = HeldBlocks()
    for parent, block in ((None, U64_MAX), (U64_MAX, 0), (0, 1)):
        assert held.store(Tier.DEVICE, [block], parent).tolist() == [block]
        held.check_invariants()
    assert held.remove(Tier.DEVICE, [0]).tolist() == [0]
    assert held.state().holes == (1, 1, 1, 1)
    assert sorted(held.held(Tier.DEVICE).tolist()) == [1, U64_MAX]
    held.check_invariants()


def test_a_parent_that_becomes_known_late_counts_from_then_on():
    """A source that lost the beginning of a chain names blocks without parents at first."""
    held = HeldBlocks()
    held.store(Tier.HOST, [5], None)
    assert held.state().holes == (0, 0, 0, 0)
    held.store(Tier.DISK, [5], 4)
    held.check_invariants()
    assert held.state().holes == (0, 1, 1, 1)
    held.remove(Tier.HOST, [5])
    held.remove(Tier.DISK, [5])
    held.check_invariants()
    assert held.state() == HeldState()


def test_a_block_that_claims_to_be_its_own_parent_does_no_harm():
    held = HeldBlocks()
    held.store(Tier.DEVICE, [5], 5)
    held.check_invariants()
    held.remove(Tier.DEVICE, [5])
    held.check_invariants()
    assert held.state() == HeldState()


def test_arrays_of_any_layout_are_read():
    held, numbers = HeldBlocks(), np.arange(10, dtype=np.uint64)
    shifted = np.frombuffer(b"\0" + numbers.tobytes(), dtype="<u8", count=10, offset=1)
    assert not shifted.flags.aligned
    for tier, keys in ((Tier.DEVICE, numbers[::-1]), (Tier.HOST, shifted), (Tier.DISK, range(10))):
        assert held.store(tier, keys, None).tolist() == list(keys)
    held.check_invariants()


def crowding(count, multiplier=DEFAULT_MULTIPLIER):
    """Keys whose home is the last slot at any size, as an attacker could choose them."""
    inverse = pow(multiplier, -1, 1 << 64)
    return [(U64_MAX - number) * inverse & U64_MAX for number in range(count)]


def test_keys_that_crowd_one_place_are_all_found():
    held, keys = HeldBlocks(), crowding(150)
    held.store(Tier.DEVICE, keys, None)
    held.check_invariants()
    assert held.remove(Tier.DEVICE, keys[::2]).tolist() == keys[::2]
    held.check_invariants()
    assert sorted(held.held(Tier.DEVICE).tolist()) == sorted(keys[1::2])


@pytest.mark.parametrize("multiplier", [1, DEFAULT_MULTIPLIER, U64_MAX])
def test_grows_in_the_middle_of_a_store_and_forgets_nothing(multiplier):
    held = HeldBlocks(multiplier)
    random = np.random.default_rng(5)
    keys = random.integers(0, U64_MAX, 20_000, dtype=np.uint64, endpoint=True)
    assert len(held.store(Tier.DEVICE, keys, 7)) == 20_000
    assert held.state().holes == (1, 1, 1, 1)
    assert set(held.held(Tier.DEVICE).tolist()) == set(keys.tolist())
    held.store(Tier.HOST, keys[:15_000], 7)
    held.remove(Tier.DEVICE, keys[::3])
    held.check_invariants()
    held.clear(Tier.DEVICE)
    held.clear(Tier.HOST)
    held.check_invariants()
    assert held.state() == HeldState()


class Model:
    """Parents, and a set a tier."""

    def __init__(self):
        self.parents, self.sets = {}, {tier: set() for tier in Tier}

    def fastest(self, block):
        return next((tier for tier in Tier if block in self.sets[tier]), TIERS)

    def holes(self):
        counts = [0] * TIERS
        for block, parent in self.parents.items():
            if parent is not None:
                for tier in range(self.fastest(block), self.fastest(parent)):
                    counts[tier] += 1
        return tuple(counts)


PARENTS = {1: None, 2: 1, 3: 2, 4: 2, 5: 4, 6: 1, 7: None, 8: 7}
tiers = st.sampled_from(Tier)
subsets = st.lists(st.sampled_from(sorted(PARENTS)), max_size=5)


class AgainstBruteForce(RuleBasedStateMachine):
    """Stores and removals in any order, children before parents too."""

    def __init__(self):
        super().__init__()
        self.held, self.model = HeldBlocks(), Model()

    @rule(tier=tiers, blocks=subsets)
    def store(self, tier, blocks):
        for block in blocks:
            self.held.store(tier, [block], PARENTS[block])
            self.model.parents[block] = PARENTS[block]
            self.model.sets[tier].add(block)

    @rule(tier=tiers, blocks=subsets)
    def remove(self, tier, blocks):
        self.held.remove(tier, blocks)
        self.model.sets[tier].difference_update(blocks)

    @rule(tier=st.none() | tiers)
    def clear(self, tier):
        self.held.clear(tier)
        for each in Tier if tier is None else (tier,):
            self.model.sets[each].clear()

    @invariant()
    def agrees(self):
        self.held.check_invariants()
        state = self.held.state()
        assert state.holes == self.model.holes()
        assert state.counts == tuple(len(self.model.sets[tier]) for tier in Tier)
        for tier in Tier:
            assert set(self.held.held(tier).tolist()) == self.model.sets[tier]


AgainstBruteForce.TestCase.settings = settings(max_examples=examples(20))
TestAgainstBruteForce = AgainstBruteForce.TestCase


CROWDED = [*crowding(12), 0, 1, 2, U64_MAX]
"""Blocks that meet in few slots; small trees and long ones, any of them above any other."""

blocks = st.sampled_from(CROWDED)
chains = st.lists(blocks, max_size=6, unique=True)


class AgainstTheDefinition(RuleBasedStateMachine):
    """Chains with any parent, contradictory ones too: every answer and sum is the same."""

    def __init__(self):
        super().__init__()
        self.held, self.definition = HeldBlocks(), HeldInDicts()

    def both(self, name, *arguments):
        changed = getattr(self.held, name)(*arguments)
        assert changed.tolist() == getattr(self.definition, name)(*arguments)

    @rule(tier=tiers, chain=chains, parent=st.none() | blocks)
    def store(self, tier, chain, parent):
        self.both("store", tier, [block for block in chain if block != parent], parent)

    @rule(tier=tiers, chain=st.lists(blocks, max_size=8))
    def remove(self, tier, chain):
        self.both("remove", tier, chain)

    @rule(tier=tiers, start=st.integers(100, 1 << 60), parent=st.none() | blocks)
    def store_many(self, tier, start, parent):
        """Enough to grow by."""
        self.both("store", tier, list(range(start, start + 150)), parent)

    @rule(tier=st.none() | tiers)
    def clear(self, tier):
        self.held.clear(tier)
        self.definition.clear(tier)

    @invariant()
    def agrees(self):
        self.held.check_invariants()
        self.definition.check_invariants()
        assert self.held.state() == self.definition.state()
        assert self.held.block_count == self.definition.block_count
        for tier in Tier:
            ours, theirs = self.held.held(tier), self.definition.held(tier)
            assert sorted(ours.tolist()) == sorted(theirs.tolist())


AgainstTheDefinition.TestCase.settings = settings(max_examples=examples(10), stateful_step_count=30)
TestAgainstTheDefinition = AgainstTheDefinition.TestCase


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.integers(1, 60))))
def test_runs_that_come_and_go_leave_no_trace(steps):
    """Names in sequence, not spread at all: long runs of slots, pulled back again and again."""
    held = HeldBlocks(multiplier=1)
    for is_store, start, length in steps:
        keys = [number << 48 for number in range(start, start + length)]
        if is_store:
            held.store(Tier.DEVICE, keys, None)
        else:
            held.remove(Tier.DEVICE, keys)
    held.check_invariants()


class Growing:
    """Both, given the same changes; every growth is followed from its first slot to its last."""

    def __init__(self, multiplier=DEFAULT_MULTIPLIER):
        self.held, self.definition = HeldBlocks(multiplier), HeldInDicts()
        self.moves = 0

    def store(self, keys, parent):
        self.held.store(Tier.DEVICE, keys, parent)
        self.definition.store(Tier.DEVICE, keys, parent)
        self.moves += self.held.table.former is not None

    def remove(self, keys):
        self.held.remove(Tier.DEVICE, keys)
        self.definition.remove(Tier.DEVICE, keys)

    def agree(self):
        assert self.held.state() == self.definition.state()
        assert set(self.held.held(Tier.DEVICE).tolist()) == set(
            self.definition.held(Tier.DEVICE).tolist()
        )
        hashes, _ = self.held.paths(Tier.DEVICE)
        assert sorted(hashes.tolist()) == sorted(self.definition.held(Tier.DEVICE).tolist())


@pytest.fixture
def pages_are_released_early(monkeypatch):
    monkeypatch.setattr(reserved_memory, "LARGE_BYTES", 1 << 14)
    monkeypatch.setattr(reserved_memory, "PART_BYTES", 5 * 4096)


@pytest.mark.usefixtures("pages_are_released_early")
@pytest.mark.parametrize("seed", range(3))
def test_grows_slot_by_slot_while_blocks_come_and_go(seed):
    random, both, pool = Random(seed), Growing(), []
    for number in range(600):
        keys = [random.getrandbits(64) for _ in range(random.randint(1, 8))]
        parent = random.choice([None, random.choice(pool) if pool else None])
        both.store(keys, parent)
        pool += keys
        if random.random() < 0.4:
            gone = random.sample(pool, min(len(pool), random.randint(1, 6)))
            pool = [key for key in pool if key not in gone]
            both.remove(gone)
        if number % 25 == 0:
            both.held.check_invariants()
            both.agree()
    both.agree()
    assert both.moves > 20


@pytest.mark.usefixtures("pages_are_released_early")
def test_grows_around_the_end_of_a_table():
    """Keys whose home is the last slot lie in the first ones, where moving begins."""
    random, both = Random(0), Growing()
    herd = crowding(1_200)
    for start in range(0, 1_200, 6):
        both.store(herd[start : start + 6], None)
        both.store([random.getrandbits(64) for _ in range(2)], None)
        if start % 60 == 0:
            both.remove(herd[start : start + 3])
            both.held.check_invariants()
            both.agree()
    both.agree()
    assert both.moves > 20


def test_a_table_that_grows_gives_the_former_one_back():
    held = HeldBlocks()
    random = np.random.default_rng(5)
    stored = 0
    while stored < 100_000 or held.table.former is not None:
        held.store(Tier.DEVICE, random.integers(1, U64_MAX, 512, dtype=np.uint64), None)
        stored += 512
    assert held.block_count == len(set(held.held(Tier.DEVICE).tolist())) == stored
    held.check_invariants()
    held.clear()
    assert held.state() == HeldState()

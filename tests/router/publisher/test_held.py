"""What a rank holds, and its holes, against brute force."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.protocol.values import FASTEST_TIER, TIERS, HeldState, Tier
from router.publisher.held import HeldBlocks


def test_fastest_tier_of_a_mask():
    assert [FASTEST_TIER[mask] for mask in (0b0000, 0b0001, 0b1000, 0b1010)] == [4, 0, 3, 1]


def test_starts_with_nothing():
    assert HeldBlocks().state() == HeldState()


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


def test_says_what_changed():
    held = HeldBlocks()
    assert held.store(Tier.DEVICE, [1, 2], None) == [1, 2]
    assert held.store(Tier.DEVICE, [1, 2, 3], None) == [3]
    assert held.remove(Tier.DEVICE, [3, 4, 3]) == [3]


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


AgainstBruteForce.TestCase.settings = settings(max_examples=200, deadline=None)
TestAgainstBruteForce = AgainstBruteForce.TestCase

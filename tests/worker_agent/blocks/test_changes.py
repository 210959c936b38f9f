"""What tiers hold, as one: against a set a tier."""

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, MergedTiers
from worker_agent.blocks.names import BlockName

TIERS = (1, 2, 4)
steps = st.lists(
    st.tuples(st.sampled_from(TIERS), st.integers(0, 3), st.sampled_from(["turn", "turn", "clear"]))
)


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


@given(steps)
def test_stored_with_the_first_and_removed_with_the_last(steps):
    merged, held, reported = MergedTiers(), {tier: set() for tier in TIERS}, set()
    for tier, number, step in steps:
        for change in merged.apply(tier, [change_of(held[tier], number, step)]):
            match change:
                case BlockStored(stored):
                    assert stored.sequence_hash not in reported
                    reported.add(stored.sequence_hash)
                case BlockRemoved(removed):
                    reported.remove(removed.sequence_hash)
        assert reported == set().union(*held.values())
        assert len(merged) == len(reported)
        for each in range(4):
            mask = sum(tier for tier in TIERS if each in held[tier])
            assert merged.tiers(name(each).identity) == mask


def change_of(tier, number, step):
    """A change that a pool could report, done to the model."""
    if step == "clear":
        tier.clear()
        return CacheCleared()
    if number in tier:
        tier.remove(number)
        return BlockRemoved(name(number))
    tier.add(number)
    return BlockStored(name(number))

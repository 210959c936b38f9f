"""Where a prompt is resumed: equal to trying every boundary, whatever the tiers have."""

from hypothesis import given
from hypothesis import strategies as st

from router.protocol.values import Tier
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from support.blocks.connectors import NAMING, groups_of, keep
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.pool import BlockPool
from worker_agent.connector.slots.held_groups import hold_groups
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.slot_blocks import SlotBlocks

SIZES = st.sampled_from([2, 4, 8])
FULL = st.tuples(SIZES, st.none())
WINDOW = st.tuples(SIZES, st.integers(1, 20))


@st.composite
def layouts(draw):
    groups = [draw(FULL), *draw(st.lists(FULL | WINDOW, max_size=3))]
    return draw(st.permutations(groups))


@given(
    layout=layouts(),
    length=st.integers(1, 50),
    boundary=st.integers(0, 6),
    chance=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    choice=st.randoms(use_true_random=False),
)
def test_prompts_are_resumed_at_the_last_boundary_at_which_all_groups_stand(
    layout, length, boundary, chance, choice
):
    groups = groups_of(layout)
    blocks = prompt(groups, length)
    held = {
        (group, place)
        for group, (size, _) in enumerate(layout)
        for place in range(length // size)
        if choice.random() < chance
    }
    tiers = [LowerTier(tier, BlockPool(200, LruEviction())) for tier in (Tier.HOST, Tier.DISK)]
    for group, place in held:  # The slower tier has all that the faster one has.
        for tier in tiers[choice.randrange(2) :]:
            keep(tier.pool, blocks.names(group, place, place + 1))
    start = min(boundary * groups.alignment, groups.aligned(length))
    found = hold_groups(tiers, blocks, groups, start)
    assert found.end == resumed_at(groups, held, length, start)
    assert found.num_blocks == sum(tier.pool.used_blocks for tier in tiers)
    assert restored(found) == needed(groups, start, found.end)
    found.release()
    assert not any(tier.pool.used_blocks for tier in tiers)


def prompt(groups, length):
    sequence = TokenBlockSequence(list(range(length)), groups.unit, request_families())
    return SlotBlocks("r", sequence, groups, NAMING, NAMING.root(None, None))


def needed(groups, start, end):
    """The blocks that are read first after `end` tokens, but for those of the first `start`."""
    return {
        (index, place)
        for index, group in enumerate(groups.all)
        for place in range(start // group.block_size, end // group.block_size)
        if group.window is None or (place + 1) * group.block_size > end - group.window + 1
    }


def resumed_at(groups, held, length, start):
    ends = range(start, length, groups.alignment)
    return max((end for end in ends if needed(groups, start, end) <= held), default=start)


def restored(found):
    return {
        (part.group, place)
        for part in found.parts
        for place in range(part.first, part.first + len(part.blocks))
    }


@given(layout=layouts(), length=st.integers(8, 40))
def test_no_two_blocks_of_groups_have_one_name(layout, length):
    groups = groups_of(layout)
    blocks = prompt(groups, length)
    names = [
        name
        for group, (size, _) in enumerate(layout)
        for name in blocks.names(group, 0, length // size)
    ]
    assert len({name.identity for name in names}) == len(names)
    published = [name for name in names if name.is_published]
    assert len({name.sequence_hash for name in published}) == len(published)

"""Orders within a block: there and back, number by number."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.orders import (
    OPERATIONAL_HND,
    OPERATIONAL_NHD,
    UNIVERSAL_TP,
    UNKNOWN_ORDER,
    BlockDim,
    BlockOrder,
    joined_by_heads,
    of_one_rank,
    reordered,
    requires_transform,
    split_by_heads,
)

NAMED = [UNIVERSAL_TP, OPERATIONAL_HND, OPERATIONAL_NHD]
orders = st.sampled_from(NAMED) | st.permutations(BlockDim).map(lambda d: BlockOrder(tuple(d)))
configs = st.builds(
    lambda heads, head_dim, layers, outer, page: LayoutConfig(
        num_blocks=2,
        num_layers=layers,
        outer_dim=outer,
        page_size=page,
        inner_dim=heads * head_dim,
        num_heads=heads,
    ),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([1, 2, 4]),
)


def numbered(config, blocks=3):
    """Blocks in which every number is another."""
    numbers = config.block_bytes // config.dtype_width_bytes
    return torch.arange(blocks * numbers).view(blocks, numbers)


@given(configs, orders, orders)
def test_there_and_back_is_the_same(config, source, target):
    blocks = numbered(config)
    there = reordered(blocks, source, target, config)
    assert torch.equal(reordered(there, target, source, config), blocks)
    assert requires_transform(source, target) == (source != target)


@given(configs, orders, orders)
def test_every_number_keeps_its_place_by_name(config, source, target):
    there = reordered(numbered(config), source, target, config)
    [block, *_] = there.view(3, *target.shape(config))
    [original, *_] = numbered(config).view(3, *source.shape(config))
    place = {dim: size - 1 for dim, size in zip(target.dims, target.shape(config), strict=True)}
    place[BlockDim.TOKENS] = 0
    assert (
        block[tuple(place[dim] for dim in target.dims)]
        == original[tuple(place[dim] for dim in source.dims)]
    )


def test_an_order_that_is_not_known_is_not_guessed():
    config = LayoutConfig(num_blocks=1, num_layers=1, outer_dim=1, page_size=1, inner_dim=4)
    blocks = torch.zeros(1, 4)
    assert reordered(blocks, UNKNOWN_ORDER, UNKNOWN_ORDER, config) is blocks
    assert requires_transform(UNKNOWN_ORDER, OPERATIONAL_NHD)
    with pytest.raises(LayoutError, match="source: not known"):
        reordered(blocks, UNKNOWN_ORDER, OPERATIONAL_NHD, config)
    with pytest.raises(LayoutError, match="num_heads: None"):
        reordered(blocks, OPERATIONAL_HND, OPERATIONAL_NHD, config)
    with pytest.raises(LayoutError, match="each dimension once"):
        BlockOrder((BlockDim.HEADS, BlockDim.HEADS))


@given(configs, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_blocks_of_one_degree_are_joined_to_those_of_another(config, ranks, other_ranks):
    heads = config.num_heads
    if heads % ranks or heads % other_ranks:
        return
    whole = numbered(config)
    universal = reordered(whole, OPERATIONAL_NHD, UNIVERSAL_TP, config)
    joined = joined_by_heads(split_by_heads(universal, config, ranks))
    parts = split_by_heads(joined, config, other_ranks)
    of_one = of_one_rank(config, other_ranks)
    computed = whole.view(3, *OPERATIONAL_NHD.shape(config)).chunk(other_ranks, dim=4)
    for part, expected in zip(parts, computed, strict=True):
        operational = reordered(part, UNIVERSAL_TP, OPERATIONAL_NHD, of_one)
        assert torch.equal(operational, expected.reshape(3, -1))


@pytest.mark.parametrize("ranks", [0, 3, 8])
def test_heads_that_ranks_do_not_divide_are_refused(ranks):
    config = LayoutConfig(
        num_blocks=1, num_layers=1, outer_dim=1, page_size=1, inner_dim=8, num_heads=4
    )
    with pytest.raises(LayoutError, match=f"ranks: {ranks}.*a divisor of 4 heads"):
        split_by_heads(torch.zeros(1, 8), config, ranks)

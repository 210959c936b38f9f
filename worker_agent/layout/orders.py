"""The order of the numbers within a block, its conversion, and its split by heads.

Universal orders are for storage and exchange: with heads first, another tensor-parallel degree is a
slice of the first dimension. Operational orders are those that attention kernels read.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError


class BlockDim(StrEnum):
    """A dimension of a block."""

    HEADS = "heads"
    LAYERS = "layers"
    OUTER = "outer"
    TOKENS = "tokens"
    HEAD_DIM = "head_dim"


class InnerShape(StrEnum):
    """The order within a region of memory."""

    NHD = "nhd"
    """[tokens, heads, head size]"""
    HND = "hnd"
    """[heads, tokens, head size]"""


class BlockOrder(Struct, frozen=True):
    """The dimensions of a block from the outermost in; empty if the order is unknown.

    Raises LayoutError for dimensions that are doubled or missing.
    """

    dims: tuple[BlockDim, ...]

    def __post_init__(self) -> None:
        if self.dims and sorted(self.dims) != sorted(BlockDim):
            shown = ", ".join(self.dims)
            raise LayoutError("dims", shown, "each dimension once", rule="order_is_a_permutation")

    @property
    def is_known(self) -> bool:
        """True if blocks of this order can be converted to another."""
        return bool(self.dims)

    def shape(self, config: LayoutConfig) -> list[int]:
        """Return a block's shape in this order. Raises LayoutError if num_heads is unknown."""
        sizes = _sizes(config)
        return [sizes[dim] for dim in self.dims]


UNIVERSAL_TP = BlockOrder(
    (BlockDim.HEADS, BlockDim.LAYERS, BlockDim.OUTER, BlockDim.TOKENS, BlockDim.HEAD_DIM)
)
UNIVERSAL_PP = BlockOrder(
    (BlockDim.LAYERS, BlockDim.HEADS, BlockDim.OUTER, BlockDim.TOKENS, BlockDim.HEAD_DIM)
)
OPERATIONAL_HND = BlockOrder(
    (BlockDim.LAYERS, BlockDim.OUTER, BlockDim.HEADS, BlockDim.TOKENS, BlockDim.HEAD_DIM)
)
OPERATIONAL_NHD = BlockOrder(
    (BlockDim.LAYERS, BlockDim.OUTER, BlockDim.TOKENS, BlockDim.HEADS, BlockDim.HEAD_DIM)
)
UNKNOWN_ORDER = BlockOrder(())


def requires_transform(source: BlockOrder, target: BlockOrder) -> bool:
    """Return whether a block's numbers have to move. Two unknown orders count as the same."""
    return source != target


def reordered(
    blocks: Tensor, source: BlockOrder, target: BlockOrder, config: LayoutConfig
) -> Tensor:
    """Return blocks in another order; the same tensor if the order is the same.

    `blocks`: (n, numbers of a block) of any dtype; the result has the same. O(bytes). Raises
    LayoutError for an unknown order.
    """
    if not requires_transform(source, target):
        return blocks
    for field, order in (("source", source), ("target", target)):
        if not order.is_known:
            raise LayoutError(field, "not known", "an order by name", rule="order_must_be_known")
    shaped = blocks.view(len(blocks), *source.shape(config))
    places = [source.dims.index(dim) + 1 for dim in target.dims]
    return shaped.permute(0, *places).reshape(len(blocks), -1)


def of_one_rank(config: LayoutConfig, ranks: int) -> LayoutConfig:
    """Return the configuration of a rank's part of the blocks of `ranks` tensor-parallel ranks.

    Raises LayoutError if the number of heads is unknown, or not a multiple of `ranks`.
    """
    heads = config.inner_dim // config.head_dim
    if ranks < 1 or heads % ranks:
        rule = "ranks_must_divide_num_heads"
        raise LayoutError("ranks", f"{ranks}", f"a divisor of {heads} heads", rule=rule)
    return replace(config, inner_dim=config.inner_dim // ranks, num_heads=heads // ranks)


def split_by_heads(blocks: Tensor, config: LayoutConfig, ranks: int) -> tuple[Tensor, ...]:
    """Return each rank's part of blocks in the order `UNIVERSAL_TP`, as views in that order.

    `blocks`: (n, numbers of a block). Raises LayoutError like `of_one_rank`.
    """
    of_one_rank(config, ranks)
    return blocks.view(len(blocks), -1).chunk(ranks, dim=1)


def joined_by_heads(parts: Sequence[Tensor]) -> Tensor:
    """Return the blocks of which `split_by_heads` returned the parts. O(bytes)."""
    return torch.cat(tuple(parts), dim=1)


def _sizes(config: LayoutConfig) -> dict[BlockDim, int]:
    head_dim = config.head_dim
    return {
        BlockDim.HEADS: config.inner_dim // head_dim,
        BlockDim.LAYERS: config.num_layers,
        BlockDim.OUTER: config.outer_dim,
        BlockDim.TOKENS: config.page_size,
        BlockDim.HEAD_DIM: head_dim,
    }

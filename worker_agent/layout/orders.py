"""The order of the numbers within a block, from one order to another, and cut by heads.

Universal orders are for keeping and exchanging: with heads first, another tensor-parallel degree is
a slice of the first dimension. Operational orders are what attention kernels read.
"""

from enum import StrEnum

import torch
from msgspec import Struct
from torch import Tensor

from router.block_errors import LayoutError
from worker_agent.layout.config import LayoutConfig


class BlockDim(StrEnum):
    """A dimension of a block."""

    HEADS = "heads"
    LAYERS = "layers"
    OUTER = "outer"
    TOKENS = "tokens"
    HEAD_DIM = "head_dim"


class BlockOrder(Struct, frozen=True):
    """Dimensions of a block from the outermost in; none where the order is not known.

    Raises LayoutError for dimensions that are doubled or missing.
    """

    dims: tuple[BlockDim, ...]

    def __post_init__(self) -> None:
        if self.dims and sorted(self.dims) != sorted(BlockDim):
            shown = ", ".join(self.dims)
            raise LayoutError("dims", shown, "each dimension once", rule="order_is_a_permutation")

    @property
    def is_known(self) -> bool:
        """Whether blocks of this order can be made into another."""
        return bool(self.dims)

    @property
    def is_operational(self) -> bool:
        """Whether every layer lies by itself, as attention kernels and memory by layer need."""
        return self.dims[:2] == (BlockDim.LAYERS, BlockDim.OUTER)

    def shape(self, config: LayoutConfig) -> list[int]:
        """Of a block in this order. Raises LayoutError where the number of heads is not known."""
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
    """Whether a block's numbers have to move. Two unknown orders are taken to be the same."""
    return source != target


def reordered(
    blocks: Tensor, source: BlockOrder, target: BlockOrder, config: LayoutConfig
) -> Tensor:
    """Blocks in another order; the same tensor if it is the same.

    `blocks`: (n, numbers of a block) of any dtype; so is what comes back. O(bytes). Raises
    LayoutError for an order that is not known.
    """
    if not requires_transform(source, target):
        return blocks
    for field, order in (("source", source), ("target", target)):
        if not order.is_known:
            raise LayoutError(field, "not known", "an order by name", rule="order_must_be_known")
    shaped = blocks.view(len(blocks), *source.shape(config))
    places = [source.dims.index(dim) + 1 for dim in target.dims]
    return shaped.permute(0, *places).reshape(len(blocks), -1)


def heads_of_rank(
    blocks: Tensor, order: BlockOrder, config: LayoutConfig, tp_rank: int, tp_size: int
) -> Tensor:
    """What one of several tensor-parallel ranks has of whole blocks, in the same order.

    `blocks`: (n, numbers of a block). Raises LayoutError when heads cannot be dealt out evenly.
    """
    heads = config.num_heads or 0
    if not 0 <= tp_rank < tp_size or heads % tp_size or not order.is_known:
        allowed = f"a rank below tp_size, and a tp_size that divides {heads} heads"
        raise LayoutError("tp_rank", f"{tp_rank} of {tp_size}", allowed, rule="heads_divide_evenly")
    shaped = blocks.view(len(blocks), *order.shape(config))
    a_rank = heads // tp_size
    place = order.dims.index(BlockDim.HEADS) + 1
    return shaped.narrow(place, tp_rank * a_rank, a_rank).reshape(len(blocks), -1)


def joined_heads(parts: list[Tensor], order: BlockOrder, part_config: LayoutConfig) -> Tensor:
    """Whole blocks of what tensor-parallel ranks have of them, in rank order; undoes
    `heads_of_rank`. `part_config` is that of one rank.
    """
    shaped = [part.view(len(part), *order.shape(part_config)) for part in parts]
    place = order.dims.index(BlockDim.HEADS) + 1
    return torch.cat(shaped, dim=place).reshape(len(parts[0]), -1)


def _sizes(config: LayoutConfig) -> dict[BlockDim, int]:
    head_dim = config.head_dim
    return {
        BlockDim.HEADS: config.inner_dim // head_dim,
        BlockDim.LAYERS: config.num_layers,
        BlockDim.OUTER: config.outer_dim,
        BlockDim.TOKENS: config.page_size,
        BlockDim.HEAD_DIM: head_dim,
    }

"""What an engine's own KV tensors say of their layout, and whether it is what was configured.

Nothing is guessed: a tensor that fits two layouts is refused, with the setting that decides.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from torch import Tensor

from router.block_errors import LayoutError
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind


class InnerShape(StrEnum):
    """The order within a region of memory."""

    UNKNOWN = "unknown"
    NHD = "nhd"
    """[tokens, heads, head size]"""
    HND = "hnd"
    """[heads, tokens, head size]"""


def common_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The one shape of a group's tensors. Raises LayoutError for none, and for several."""
    if not tensors:
        raise LayoutError("tensors", "none", "at least one", rule="tensors_must_not_be_empty")
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        rule = "tensors_must_have_one_shape"
        raise LayoutError("tensors", shown, "one shape; a layout group for each", rule=rule)
    return shapes.pop()


def inner_shape(tensors: Sequence[Tensor]) -> InnerShape:
    """What the strides say of the order within a block, to confirm what was configured.

    Raises LayoutError for no tensor, fewer than two dimensions, and strides that grow.
    """
    common_shape(tensors)
    found = {_inner_shape(tensor.stride()) for tensor in tensors}
    return found.pop() if len(found) == 1 else InnerShape.UNKNOWN


def layer_kind(shape: Sequence[int], config: LayoutConfig) -> LayoutKind:
    """In which of the two ways a layer's tensor of this shape is laid out.

    Its first dimensions are [block, outer] or [outer, block]; what follows are the page and the
    inner dimensions, in any split. Raises LayoutError for one that fits neither, or both.
    """
    leading = {
        LayoutKind.BLOCK_FIRST: [config.num_blocks, config.outer_dim],
        LayoutKind.BLOCK_SECOND: [config.outer_dim, config.num_blocks],
    }
    if config.outer_dim == 1:
        leading = {LayoutKind.BLOCK_FIRST: [config.num_blocks]}
    fitting = [kind for kind, dims in leading.items() if _fits(shape, dims, config)]
    if len(fitting) == 1:
        return fitting[0]
    allowed = " or ".join(f"{kind} {dims}" for kind, dims in leading.items())
    reason = f"{list(shape)} fits {'both' if fitting else 'none'}"
    raise LayoutError("tensor", reason, f"{allowed}, set explicitly", rule="layout_is_ambiguous")


def _fits(shape: Sequence[int], leading: Sequence[int], config: LayoutConfig) -> bool:
    rest = 1
    for size in shape[len(leading) :]:
        rest *= size
    return list(shape[: len(leading)]) == list(leading) and rest == (
        config.page_size * config.inner_dim
    )


def _inner_shape(stride: Sequence[int]) -> InnerShape:
    if len(stride) < 2:
        rule = "tensor_must_have_two_dimensions"
        raise LayoutError("tensor", f"{len(stride)} dimensions", "at least 2", rule=rule)
    if any(inner > outer for outer, inner in pairwise(stride)):
        rule = "strides_must_not_increase"
        raise LayoutError("tensor", f"strides {list(stride)}", "none that grows", rule=rule)
    return InnerShape.NHD if len(stride) >= 3 and stride[0] > stride[1] else InnerShape.UNKNOWN

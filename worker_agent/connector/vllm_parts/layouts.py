"""How an engine's KV tensors are laid out, as its own numbers say; nothing else is guessed."""

from collections.abc import Mapping

from torch import Tensor

from router.block_errors import LayoutError
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.groups import LayoutGroup
from worker_agent.layout.strides import LayoutKind


def layout_groups(
    tensors: Mapping[str, Tensor], num_blocks: int, block_size: int
) -> list[LayoutGroup]:
    """Layers of one shape and type are a group, in the order of the layers' names as given.

    Within a block nothing is looked at: kernels pack it as they like. Raises LayoutError.
    """
    alike: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for layer, tensor in tensors.items():
        alike.setdefault((tuple(tensor.shape), tensor.element_size()), []).append(layer)
    return [
        _group(f"group {number}", layers, shape, width, (num_blocks, block_size))
        for number, ((shape, width), layers) in enumerate(alike.items())
    ]


def _group(
    name: str, layers: list[str], shape: tuple[int, ...], width: int, counts: tuple[int, int]
) -> LayoutGroup:
    num_blocks, block_size = counts
    kind, outer = _kind(layers[0], shape, num_blocks)
    numbers = 1
    for size in shape[len(kind_dims(kind)) :]:
        numbers *= size
    inner, odd = divmod(numbers, block_size)
    if odd or not inner:
        allowed = f"whole tokens, {block_size} of them in a block"
        raise LayoutError(layers[0], f"shape {list(shape)}", allowed, rule="tensor_shape_mismatch")
    config = LayoutConfig(
        num_blocks, len(layers), outer, block_size, inner, dtype_width_bytes=width
    )
    return LayoutGroup(name, tuple(layers), config, kind)


def kind_dims(kind: LayoutKind) -> tuple[str, ...]:
    """The dimensions of a layer's tensor before those of a block's content."""
    return ("block",) if kind is LayoutKind.BLOCK_FIRST else ("outer", "block")


def _kind(layer: str, shape: tuple[int, ...], num_blocks: int) -> tuple[LayoutKind, int]:
    is_first = shape[:1] == (num_blocks,)
    is_second = shape[:2] == (2, num_blocks)
    if is_first == is_second:
        reason = f"shape {list(shape)} fits {'both' if is_first else 'none'}"
        allowed = f"[{num_blocks} blocks, …] or [2, {num_blocks} blocks, …]"
        raise LayoutError(layer, reason, allowed, rule="layout_is_ambiguous")
    return (LayoutKind.BLOCK_FIRST, 1) if is_first else (LayoutKind.BLOCK_SECOND, 2)

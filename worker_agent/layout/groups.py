"""Groups of layers with the same tensor layout, as the integration of a model defines them.

A model with several kinds of attention (MLA beside an indexer, sliding windows, linear layers) has
KV tensors of several shapes. Each kind is a group with a configuration of its own. A tensor of no
group, of two, or of another shape than its group's is refused. Nothing is inferred from sizes
alone.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from torch import Tensor

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.strides import LayoutKind


class LayoutGroup(Struct, frozen=True):
    """Layers of one layout, by the engine's names of them, in order.

    Raises LayoutError if the configuration has another number of layers.
    """

    name: str
    layers: tuple[str, ...]
    config: LayoutConfig
    kind: LayoutKind

    def __post_init__(self) -> None:
        if len(self.layers) != self.config.num_layers:
            reason = f"{len(self.layers)} of {self.name}"
            allowed = f"{self.config.num_layers}, as in num_layers"
            raise LayoutError("layers", reason, allowed, rule="layers_must_match_config")

    @property
    def leading_shape(self) -> list[int]:
        """The dimensions of a layer's tensor before those of a page.

        If blocks are contiguous, those of the one tensor of all layers.
        """
        config = self.config
        outer = [config.outer_dim] if config.outer_dim > 1 else []
        match self.kind:
            case LayoutKind.CONTIGUOUS:
                return [config.num_blocks, config.num_layers, *outer]
            case LayoutKind.BLOCK_FIRST:
                return [config.num_blocks, *outer]
            case LayoutKind.BLOCK_SECOND:
                return [*outer, config.num_blocks]


def grouped(
    tensors: Mapping[str, Tensor], groups: Sequence[LayoutGroup]
) -> dict[str, list[Tensor]]:
    """Return the tensors of each group, layer by layer. Raises LayoutError with the tensor."""
    _check_membership(tensors, groups)
    for group in groups:
        for layer in group.layers:
            _check_tensor(layer, tensors[layer], group)
    return {group.name: [tensors[layer] for layer in group.layers] for group in groups}


def _check_membership(tensors: Mapping[str, Tensor], groups: Sequence[LayoutGroup]) -> None:
    group_of: dict[str, str] = {}
    for group in groups:
        for layer in group.layers:
            other = group_of.setdefault(layer, group.name)
            if other is not group.name:
                reason = f"{layer} is in {other} and {group.name}"
                raise LayoutError("groups", reason, "one group per layer", rule="one_group_a_layer")
            if layer not in tensors:
                reason = f"{layer} of {group.name} has no tensor"
                raise LayoutError("tensors", reason, ", ".join(tensors), rule="tensor_missing")
    strays = [layer for layer in tensors if layer not in group_of]
    if strays:
        reason = f"{', '.join(strays)} in no group"
        raise LayoutError("tensors", reason, "a group for each", rule="tensor_in_no_group")


def _check_tensor(layer: str, tensor: Tensor, group: LayoutGroup) -> None:
    leading, page = group.leading_shape, group.config.page_size * group.config.inner_dim
    shape = list(tensor.shape)
    rest = tensor.shape[len(leading) :].numel()
    if shape[: len(leading)] != leading or rest != page:
        allowed = f"{leading} and a page of {page} numbers, as {group.name} requires"
        raise LayoutError(layer, f"shape {shape}", allowed, rule="tensor_shape_mismatch")
    if tensor.element_size() != group.config.dtype_width_bytes:
        allowed = f"{group.config.dtype_width_bytes} bytes per number"
        raise LayoutError(layer, f"dtype {tensor.dtype}", allowed, rule="dtype_width_mismatch")
    if any(inner > outer for outer, inner in pairwise(tensor.stride())):
        reason = f"strides {list(tensor.stride())}"
        raise LayoutError(layer, reason, "non-increasing ones", rule="strides_must_not_increase")

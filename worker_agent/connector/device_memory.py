"""The engine's own KV tensors as blocks that can be gathered and scattered.

The caller that registers them states their layout; it is not derived from shapes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from worker_agent.layout.errors import LayoutError
from worker_agent.layout.groups import LayoutGroup, grouped
from worker_agent.layout.strides import LayoutKind
from worker_agent.storage.base import StorageKind
from worker_agent.storage.memory import MemoryStorage
from worker_agent.transfer.copy_stream import CopyDevice, DeviceCopy
from worker_agent.transfer.device_copies import DeviceCopies, LayerGather, LayerScatter
from worker_agent.transfer.physical import PhysicalLayout, physical


class DeviceMemory:
    """Blocks over the tensors of all layers.

    A row is a block: its part in the first group, then in the second, and so on.
    """

    __slots__ = ("_copies", "block_bytes", "has_layers_apart", "layers", "num_blocks")

    def __init__(
        self,
        agent: str,
        tensors: Mapping[str, Tensor],
        groups: Sequence[LayoutGroup],
        copy_device: CopyDevice | None = None,
    ) -> None:
        """Register the tensors. `copy_device`: None derives it from them.

        Raises LayoutError with the tensor's name if one differs from its group.
        """
        if not groups:
            raise LayoutError("groups", "none", "at least one", rule="groups_must_not_be_empty")
        counts = {group.config.num_blocks for group in groups}
        if len(counts) > 1:
            shown = " and ".join(str(count) for count in sorted(counts))
            rule = "groups_must_have_as_many_blocks"
            raise LayoutError("groups", f"{shown} blocks", "the same number in all", rule=rule)
        [self.num_blocks] = counts
        members = grouped(tensors, groups)
        self.layers = tuple(layer for group in groups for layer in group.layers)
        layouts = [_laid_out(agent, group, members[group.name]) for group in groups]
        self.has_layers_apart = all(group.kind.is_layer_separate for group in groups)
        """True if layers can be copied one by one."""
        self._copies = DeviceCopies(layouts, copy_device)
        self.block_bytes = self._copies.block_bytes

    def gather(self, blocks: Sequence[int]) -> DeviceCopy:
        """Begin to copy blocks to rows on the host. Raises TransferError for an invalid block."""
        return self._copies.gather(blocks, self._copies.host_rows(len(blocks)))

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> DeviceCopy:
        """Begin to copy the first rows, on the host, into blocks. Raises TransferError."""
        return self._copies.scatter(blocks, rows)

    def gather_by_layer(self, blocks: Sequence[int]) -> LayerGather:
        """Begin to copy blocks as their layers are saved; a layer is its place in `layers`."""
        return self._copies.gather_by_layer(blocks)

    def scatter_by_layer(self, blocks: Sequence[int], rows: Tensor) -> LayerScatter:
        """Begin to copy the first rows into blocks, of which the engine awaits each layer."""
        return self._copies.scatter_by_layer(blocks, rows)


def _laid_out(agent: str, group: LayoutGroup, tensors: Sequence[Tensor]) -> PhysicalLayout:
    """Return the layout over the tensors. Raises RegionError if a tensor is too small."""
    regions = tensors[:1] if group.kind is LayoutKind.CONTIGUOUS else tensors
    storages = [MemoryStorage(_bytes(group, each), StorageKind.DEVICE) for each in regions]
    return physical(agent).configured(group.config).laid_out(group.kind).over_memory(storages)


def _bytes(group: LayoutGroup, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        reason = f"strides {list(tensor.stride())}"
        rule = "tensor_must_be_contiguous"
        raise LayoutError(group.name, reason, "contiguous memory", rule=rule)
    return tensor.view(torch.uint8).flatten()

"""A layout over real memory, built in steps of which only the right order is possible.

    physical(agent).configured(config).laid_out(kind).allocated_on_host() ─▶ PhysicalLayout
                                                     .allocated_on_device(device)
                                                     .allocated_on_disk(path)
                                                     .over_memory(storages)

Source: the type-state builder of Dynamo's `PhysicalLayout`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind, required_allocations, round_up
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import (
    MemoryStorage,
    device_memory,
    disk_memory,
    host_memory,
)

LAYER_ALIGNMENT_BYTES = 512
"""Alignment of the layers that share one allocation."""


class PhysicalLayout:
    """Blocks in memory.

    `layout`: the addresses of the blocks. `regions`: the memory, (bytes,) uint8 each, in
    `storages`.
    """

    __slots__ = ("agent", "kind", "layout", "regions", "storages")

    def __init__(
        self,
        agent: str,
        layout: Layout,
        regions: Sequence[Tensor],
        storages: Sequence[MemoryStorage],
    ) -> None:
        self.agent = agent
        self.layout = layout
        self.regions = tuple(regions)
        self.kind = storages[0].kind
        self.storages = tuple(storages)

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.regions[0].device

    def is_same_memory(self, other: "PhysicalLayout") -> bool:
        """Return whether the blocks of both layouts are the same bytes."""
        return self.device == other.device and self.layout.regions == other.layout.regions

    def close(self) -> None:
        """Release the memory; it is freed when all its registrations are released."""
        self.regions = ()
        for storage in self.storages:
            storage.close()


class Agent(Struct, frozen=True):
    """Builder with the agent that owns the memory."""

    name: str

    def configured(self, config: LayoutConfig) -> "Configured":
        """Return a builder with the blocks' configuration."""
        return Configured(self.name, config)


class Configured(Struct, frozen=True):
    """Builder with the agent and the blocks' configuration."""

    agent: str
    config: LayoutConfig

    def laid_out(self, kind: LayoutKind) -> "LaidOut":
        """Return a builder with the order of the data."""
        return LaidOut(self.agent, self.config, kind)


class LaidOut(Struct, frozen=True):
    """Builder of everything except the memory."""

    agent: str
    config: LayoutConfig
    kind: LayoutKind

    def allocated_on_host(self) -> PhysicalLayout:
        """Allocate the layout in this process's memory. Raises StorageError."""
        return self._allocated(host_memory)

    def allocated_on_device(self, device: torch.device) -> PhysicalLayout:
        """Allocate the layout in a device's memory. Raises StorageError."""
        return self._allocated(lambda size_bytes: device_memory(size_bytes, device))

    def allocated_on_disk(self, path: Path) -> PhysicalLayout:
        """Lay it out in a file, which keeps its blocks after `close`. Raises StorageError.

        A file of another size is emptied first.
        """
        return self._allocated(lambda size_bytes: disk_memory(MappedFile(path, size_bytes)))

    def over_memory(self, storages: Sequence[MemoryStorage]) -> PhysicalLayout:
        """Build the layout over existing memory, one storage per region.

        Raises RegionError if the number of storages is wrong, one is too small, or their kinds
        differ.
        """
        kinds = {storage.kind for storage in storages}
        if len(kinds) > 1:
            shown = " and ".join(sorted(kinds))
            rule = "regions_in_one_location"
            raise RegionError("regions", shown, "memory of one kind", rule=rule)
        layout = Layout(self.config, self.kind, [storage.region for storage in storages])
        regions = [storage.tensor for storage in storages]
        return PhysicalLayout(self.agent, layout, regions, storages)

    def _allocated(self, allocate: Callable[[int], MemoryStorage]) -> PhysicalLayout:
        """Allocate once and split the memory into regions."""
        sizes = required_allocations(self.config, self.kind)
        starts = [0]
        for size_bytes in sizes:
            starts.append(round_up(starts[-1] + size_bytes, LAYER_ALIGNMENT_BYTES))
        storage = allocate(starts[-1])
        regions = [storage.view(start, size) for start, size in zip(starts, sizes, strict=False)]
        described = [MemoryRegion(region.data_ptr(), region.numel()) for region in regions]
        layout = Layout(self.config, self.kind, described)
        return PhysicalLayout(self.agent, layout, regions, [storage])


def physical(agent: str) -> Agent:
    """Begin a layout over real memory; `agent` is the worker's id, in digits."""
    return Agent(agent)

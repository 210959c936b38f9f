"""Layouts by handle: what transfers and peers may name, for as long as the memory is there.

    storages ─▶ Layout ─▶ register ─▶ LayoutHandle ─▶ get, descriptor
                             └─ entered with every storage: one that is closed takes the layout away

Source: registered layouts of Dynamo's second block manager.
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from router.block_errors import RegionError, RegistrationError
from router.errors import InvalidFieldError
from router.protocol.values import U64_MAX, Tier
from worker_agent.layout.descriptor import (
    AgentMetadata,
    BlockOrderName,
    LayoutDescriptor,
    Location,
    described,
)
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.storage.base import Storage, StorageKind

MAX_LAYOUTS = 1 << 16
_MEMORY_TYPES = {StorageKind.DEVICE: "VRAM", StorageKind.DISK: "FILE"}


class LayoutHandle(Struct, frozen=True, order=True):
    """Names a layout in the fleet."""

    worker_id: int
    layout_id: int
    """0 to 65,535, in order of registration; never another layout's."""

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.layout_id}"


class RegisteredLayout(Struct, frozen=True):
    """A layout, the tier whose blocks lie there, and the memory it is laid on."""

    handle: LayoutHandle
    tier: Tier
    layout: Layout
    storages: tuple[Storage, ...]


class RegisteredLayouts:
    """The layouts of one worker.

    Invariant: a layout is here exactly while each of its storages has this worker registered.
    """

    __slots__ = ("_layouts", "_next_id", "worker_id")

    def __init__(self, worker_id: int) -> None:
        """Raises InvalidFieldError."""
        if not 0 <= worker_id <= U64_MAX:
            raise InvalidFieldError("worker_id", f"{worker_id}", "0 to 2^64 - 1")
        self.worker_id = worker_id
        self._layouts: dict[LayoutHandle, RegisteredLayout] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._layouts)

    def register(self, tier: Tier, layout: Layout, storages: Sequence[Storage]) -> LayoutHandle:
        """Name a layout. Raises RegistrationError for memory that has a layout of this worker, and
        for one layout too many; RegionError for a region that is in none of the storages. Nothing
        is registered then.
        """
        for index, region in enumerate(layout.regions):
            _check_within(index, region, storages)
        if self._next_id == MAX_LAYOUTS:
            raise RegistrationError("layout", "one too many", f"{MAX_LAYOUTS} in a worker's life")
        handle = LayoutHandle(self.worker_id, self._next_id)
        self._enter(handle, storages)
        self._next_id += 1
        self._layouts[handle] = RegisteredLayout(handle, tier, layout, tuple(storages))
        return handle

    def get(self, handle: LayoutHandle) -> RegisteredLayout:
        """Raises RegistrationError for one that is not, or no longer, registered."""
        registered = self._layouts.get(handle)
        if registered is None:
            allowed = ", ".join(map(str, self._layouts)) or "none"
            raise RegistrationError(f"layout {handle}", "not registered", allowed)
        return registered

    def descriptor(
        self, handle: LayoutHandle, order: BlockOrderName = "Unknown"
    ) -> LayoutDescriptor:
        """What a peer has to know of it. Raises RegistrationError; LayoutError for an order that
        the layout cannot have.
        """
        registered = self.get(handle)
        first = registered.storages[0]
        memory_type = _MEMORY_TYPES.get(first.kind, "DRAM")
        metadata = AgentMetadata(self._key, memory_type, first.device_id)
        return described(registered.layout, _location(first), metadata, order)

    def release(self, handle: LayoutHandle) -> None:
        """Nobody relies on it any more. Raises RegistrationError for one that is not registered."""
        for storage in self.get(handle).storages:
            storage.registrations.drop(self._key)
        del self._layouts[handle]

    def close(self) -> None:
        """Release all, those registered last first."""
        for handle in reversed(tuple(self._layouts)):
            self.release(handle)

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring."""
        for handle, registered in self._layouts.items():
            assert handle == registered.handle
            assert all(self._key in storage.registrations for storage in registered.storages)

    @property
    def _key(self) -> str:
        """Under which storages know this worker: an agent's name is its worker id, in digits."""
        return f"{self.worker_id}"

    def _enter(self, handle: LayoutHandle, storages: Sequence[Storage]) -> None:
        entered: list[Storage] = []
        try:
            for storage in storages:
                storage.registrations.add(self._key, partial(self._forget, handle, storage))
                entered.append(storage)
        except RegistrationError:
            for storage in entered:
                storage.registrations.drop(self._key)
            raise

    def _forget(self, handle: LayoutHandle, closing: Storage) -> None:
        """A storage is to go: it drops its own registration, we drop the others."""
        for storage in self._layouts.pop(handle).storages:
            if storage is not closing:
                storage.registrations.drop(self._key)


def _check_within(index: int, region: MemoryRegion, storages: Sequence[Storage]) -> None:
    for storage in storages:
        if storage.region.address <= region.address and region.end <= storage.region.end:
            return
    reason = f"{region.address:#x} to {region.end:#x}"
    allowed = "a part of one of the storages"
    raise RegionError(f"regions[{index}]", reason, allowed, rule="region_not_registered")


def _location(storage: Storage) -> Location:
    match storage.kind:
        case StorageKind.DEVICE:
            return {"Device": storage.device_id}
        case StorageKind.DISK:
            return {"Disk": storage.device_id}
        case StorageKind.PINNED:
            return "Pinned"
        case _:
            return "System"

"""Layouts by handle, as transfers and peers name them, while their memory exists.

    storages ─▶ Layout ─▶ register ─▶ LayoutHandle ─▶ get, descriptor
                             └─ registered with every storage: closing one removes the layout

Source: registered layouts of Dynamo's second block manager.
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.values import U64_MAX, Tier
from worker_agent.layout.descriptor import (
    AgentMetadata,
    BlockOrderName,
    LayoutDescriptor,
    Location,
    described,
)
from worker_agent.layout.errors import RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.storage.base import Storage, StorageKind
from worker_agent.storage.errors import RegistrationError

MAX_LAYOUTS = 1 << 16
_MEMORY_TYPES = {StorageKind.DEVICE: "VRAM", StorageKind.DISK: "FILE"}


class LayoutHandle(Struct, frozen=True, order=True):
    """The name of a layout in the fleet."""

    worker_id: int
    layout_id: int
    """A number from 0 to 65,535, in order of registration; never reused."""

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.layout_id}"


class RegisteredLayout(Struct, frozen=True):
    """A layout, the tier of its blocks, and the storages it covers."""

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
        """Create an empty set. Raises InvalidFieldError for an invalid worker id."""
        if not 0 <= worker_id <= U64_MAX:
            raise InvalidFieldError("worker_id", f"{worker_id}", "0 to 2^64 - 1")
        self.worker_id = worker_id
        self._layouts: dict[LayoutHandle, RegisteredLayout] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._layouts)

    def register(self, tier: Tier, layout: Layout, storages: Sequence[Storage]) -> LayoutHandle:
        """Register a layout, and return its handle.

        Raises RegistrationError for a storage that already has a layout of this worker, and beyond
        the limit of layouts; RegionError for a region in none of the storages. Nothing is then
        registered.
        """
        for index, region in enumerate(layout.regions):
            _check_within(index, region, storages)
        if self._next_id == MAX_LAYOUTS:
            raise RegistrationError("layout", "one too many", f"{MAX_LAYOUTS} per worker process")
        handle = LayoutHandle(self.worker_id, self._next_id)
        self._enter(handle, storages)
        self._next_id += 1
        self._layouts[handle] = RegisteredLayout(handle, tier, layout, tuple(storages))
        return handle

    def get(self, handle: LayoutHandle) -> RegisteredLayout:
        """Return a registered layout. Raises RegistrationError if it is not registered."""
        registered = self._layouts.get(handle)
        if registered is None:
            allowed = ", ".join(map(str, self._layouts)) or "none"
            raise RegistrationError(f"layout {handle}", "not registered", allowed)
        return registered

    def descriptor(
        self, handle: LayoutHandle, order: BlockOrderName = "Unknown"
    ) -> LayoutDescriptor:
        """Return the descriptor of a layout for peers.

        Raises RegistrationError; LayoutError for an order that the layout cannot have.
        """
        registered = self.get(handle)
        first = registered.storages[0]
        memory_type = _MEMORY_TYPES.get(first.kind, "DRAM")
        metadata = AgentMetadata(self._key, memory_type, first.device_id)
        return described(registered.layout, _location(first), metadata, order)

    def release(self, handle: LayoutHandle) -> None:
        """Release a layout that is no longer used. Raises RegistrationError for an unknown one."""
        for storage in self.get(handle).storages:
            storage.registrations.drop(self._key)
        del self._layouts[handle]

    def close(self) -> None:
        """Release all layouts, the last registered first."""
        for handle in reversed(tuple(self._layouts)):
            self.release(handle)

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring."""
        for handle, registered in self._layouts.items():
            assert handle == registered.handle
            assert all(self._key in storage.registrations for storage in registered.storages)

    @property
    def _key(self) -> str:
        """The name of this worker in its storages, as agents use it: its worker id in digits."""
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
        """Remove the layout of a closing storage, which drops its own registration itself."""
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

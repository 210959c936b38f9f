"""The interface of every storage: its kind, its region, and its registered users."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from worker_agent.layout.layout import MemoryRegion
from worker_agent.storage.errors import RegistrationError


class StorageKind(StrEnum):
    """The kind of memory or medium that holds the bytes."""

    SYSTEM = "system"
    PINNED = "pinned"
    SHARED = "shared"
    DEVICE = "device"
    DISK = "disk"
    REMOTE = "remote"


class Registrations:
    """The registered users of a storage, by name."""

    __slots__ = ("_releases",)

    def __init__(self) -> None:
        self._releases: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._releases)

    def __contains__(self, key: str) -> bool:
        return key in self._releases

    def add(self, key: str, release: Callable[[], None]) -> None:
        """Register a user; `release` is called when the storage closes.

        Raises RegistrationError for a name that is already registered.
        """
        if key in self._releases:
            raise RegistrationError(key, "registered already", "an unused name")
        self._releases[key] = release

    def drop(self, key: str) -> None:
        """Remove a user. Raises RegistrationError for one that is not registered."""
        if self._releases.pop(key, None) is None:
            raise RegistrationError(key, "not registered", ", ".join(self._releases) or "none")

    def release_all(self) -> None:
        """Release all users, the latest first. One that fails stays registered, and raises."""
        while self._releases:
            key = next(reversed(self._releases))
            self._releases[key]()
            del self._releases[key]


class Storage(Protocol):
    """The bytes that blocks are stored in: memory, or a file."""

    @property
    def kind(self) -> StorageKind:
        """The kind of storage."""

    @property
    def device_id(self) -> int:
        """The index of the device; 0 if there is only one."""

    @property
    def region(self) -> MemoryRegion:
        """The address range, in its own address space. Raises StorageError after `close`."""

    @property
    def registrations(self) -> Registrations:
        """The registered users."""

    def close(self) -> None:
        """Release all registered users, then free the storage."""

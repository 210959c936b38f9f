"""What every storage has, whatever it is made of: a kind, a region, and who relies on it."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from router.block_errors import RegistrationError
from worker_agent.layout.layout import MemoryRegion


class StorageKind(StrEnum):
    """Where bytes lie."""

    SYSTEM = "system"
    PINNED = "pinned"
    SHARED = "shared"
    DEVICE = "device"
    DISK = "disk"
    REMOTE = "remote"


class Registrations:
    """Who else relies on a storage, by name."""

    __slots__ = ("_releases",)

    def __init__(self) -> None:
        self._releases: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._releases)

    def __contains__(self, key: str) -> bool:
        return key in self._releases

    def add(self, key: str, release: Callable[[], None]) -> None:
        """`release` is called when the storage is to go. Raises RegistrationError for a name that
        is registered.
        """
        if key in self._releases:
            raise RegistrationError(key, "registered already", "a name that is not")
        self._releases[key] = release

    def drop(self, key: str) -> None:
        """It relies on the storage no longer. Raises RegistrationError for one that never did."""
        if self._releases.pop(key, None) is None:
            raise RegistrationError(key, "not registered", ", ".join(self._releases) or "none")

    def release_all(self) -> None:
        """Tell everybody, the last to come first. One that fails stays registered, and raises."""
        while self._releases:
            key = next(reversed(self._releases))
            self._releases[key]()
            del self._releases[key]


class Storage(Protocol):
    """Bytes that blocks lie in: memory, or a file."""

    @property
    def kind(self) -> StorageKind:
        """What it is made of."""

    @property
    def device_id(self) -> int:
        """Which of several devices; 0 where there is but one."""

    @property
    def region(self) -> MemoryRegion:
        """Where it lies, in addresses of its own. Raises StorageError once it is closed."""

    @property
    def registrations(self) -> Registrations:
        """Who relies on it."""

    def close(self) -> None:
        """Give it back, once everybody registered has let go."""

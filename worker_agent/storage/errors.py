"""Errors of the memory, files and stores that hold blocks."""

from router.errors import KvRouterError


class StorageError(KvRouterError):
    """Memory, a file or a store for blocks that is unavailable, in whole or in part."""

    code = "storage"

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field


class RegistrationError(StorageError):
    """A name that cannot be registered with a storage, or unregistered from it."""

    code = "storage_registration"

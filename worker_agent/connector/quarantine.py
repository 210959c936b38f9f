"""The engine's blocks that a lost transfer may still write into, or read from.

Nobody may use them until the worker says what became of the transfer, or is gone with its memory.
"""

from collections.abc import Sequence

from router.slot_errors import RequestKey
from worker_agent.connector.protocol import Operation


class Quarantine:
    """Blocks by the transfer that holds them. Calls O(blocks of a transfer)."""

    __slots__ = ("_held", "released_blocks")

    def __init__(self) -> None:
        self._held: dict[int, Operation] = {}
        self.released_blocks = 0
        """So many were found to be safe again since the start."""

    def __len__(self) -> int:
        """Blocks now."""
        return sum(len(operation.blocks) for operation in self._held.values())

    def add(self, operations: Sequence[Operation]) -> None:
        """Nobody knows whether these are still being made."""
        self._held.update((operation.uuid, operation) for operation in operations)

    def release(self, uuid: int) -> Operation | None:
        """The worker said after all what became of this one; None if it is not here."""
        operation = self._held.pop(uuid, None)
        self.released_blocks += 0 if operation is None else len(operation.blocks)
        return operation

    def uuids_of(self, key: RequestKey) -> list[int]:
        """Of this request's transfers. O(transfers here)."""
        return [uuid for uuid, operation in self._held.items() if operation.key == key]

    def release_of(self, key: RequestKey) -> None:
        """The worker does nothing any more for this request. O(transfers here)."""
        for uuid in self.uuids_of(key):
            self.release(uuid)

    def release_all(self) -> None:
        """The worker is gone, and with it whatever it was doing."""
        for uuid in list(self._held):
            self.release(uuid)

    def keys(self) -> set[RequestKey]:
        """Requests that have blocks here."""
        return {operation.key for operation in self._held.values()}

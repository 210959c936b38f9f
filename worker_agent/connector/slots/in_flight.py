"""The transfers that a worker has received and not completed, by uuid and by request."""

from worker_agent.connector.slots.errors import RequestKey
from worker_agent.connector.slots.protocol import Operation, TransferKind


class InFlightTransfers:
    """Operations of followed requests. Calls are O(1), or O(size of the result)."""

    __slots__ = ("_by_key", "_by_uuid")

    def __init__(self) -> None:
        self._by_uuid: dict[int, Operation] = {}
        self._by_key: dict[RequestKey, dict[int, Operation]] = {}

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __contains__(self, key: RequestKey) -> bool:
        """Return whether this request is followed."""
        return key in self._by_key

    def follow(self, key: RequestKey) -> None:
        """Accept operations of this request."""
        self._by_key.setdefault(key, {})

    def forget(self, key: RequestKey) -> None:
        """Stop accepting operations of this request, which has none in progress."""
        assert not self._by_key[key]
        del self._by_key[key]

    def add(self, operation: Operation) -> bool:
        """Add an operation; return False if it is a repetition or its request is not followed."""
        operations = self._by_key.get(operation.key)
        if operations is None or operation.uuid in self._by_uuid:
            return False
        self._by_uuid[operation.uuid] = operations[operation.uuid] = operation
        return True

    def get(self, uuid: int) -> Operation | None:
        """Return the operation, or None if it is not in progress."""
        return self._by_uuid.get(uuid)

    def pop(self, uuid: int) -> Operation:
        """Remove a completed operation and return it."""
        operation = self._by_uuid.pop(uuid)
        del self._by_key[operation.key][uuid]
        return operation

    def of(self, key: RequestKey, kind: TransferKind | None = None) -> list[int]:
        """Return the uuids of a request's operations, of one kind or of both."""
        operations = self._by_key[key].values()
        return [each.uuid for each in operations if kind in {None, each.kind}]

    def stores(self) -> list[int]:
        """Return the uuids of all stores."""
        return [uuid for uuid, each in self._by_uuid.items() if each.kind is TransferKind.STORE]

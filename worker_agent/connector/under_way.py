"""Which transfers a worker was told of and has not finished, by uuid and by request."""

from router.slot_errors import RequestKey
from worker_agent.connector.protocol import Operation, TransferKind


class UnderWay:
    """Operations of followed requests. Calls O(1), or O(what they answer)."""

    __slots__ = ("_by_key", "_by_uuid")

    def __init__(self) -> None:
        self._by_uuid: dict[int, Operation] = {}
        self._by_key: dict[RequestKey, dict[int, Operation]] = {}

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __contains__(self, key: RequestKey) -> bool:
        """Whether this request is followed."""
        return key in self._by_key

    def follow(self, key: RequestKey) -> None:
        """Operations of this request may come."""
        self._by_key.setdefault(key, {})

    def forget(self, key: RequestKey) -> None:
        """They may not any more; none may be under way."""
        assert not self._by_key[key]
        del self._by_key[key]

    def add(self, operation: Operation) -> bool:
        """False for one that is here, or of a request that is not followed."""
        operations = self._by_key.get(operation.key)
        if operations is None or operation.uuid in self._by_uuid:
            return False
        self._by_uuid[operation.uuid] = operations[operation.uuid] = operation
        return True

    def get(self, uuid: int) -> Operation | None:
        """The operation, if it is under way."""
        return self._by_uuid.get(uuid)

    def pop(self, uuid: int) -> Operation:
        """It is over."""
        operation = self._by_uuid.pop(uuid)
        del self._by_key[operation.key][uuid]
        return operation

    def of(self, key: RequestKey, kind: TransferKind | None = None) -> list[int]:
        """Those of a request, of one kind or of both."""
        operations = self._by_key[key].values()
        return [each.uuid for each in operations if kind in {None, each.kind}]

    def stores(self) -> list[int]:
        """All that are stored."""
        return [uuid for uuid, each in self._by_uuid.items() if each.kind is TransferKind.STORE]

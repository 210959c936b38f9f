"""The transfers of one request: which wait to be told to the worker, which are under way, and what
became of its loads.

    add ─▶ pending ──take──▶ under way ──settle──▶ gone
              │                  │
              └── void, drop ────┴── expire ──▶ unknown   (see quarantine.py)
"""

from worker_agent.connector.protocol import Completion, Operation, TransferKind, failed


class TransferLedger:
    """Every transfer settles once. All calls O(transfers) of the request."""

    __slots__ = ("_loads", "_pending", "_under_way", "failed_blocks", "verified_blocks")

    def __init__(self) -> None:
        self._pending: list[Operation] = []
        self._under_way: dict[int, Operation] = {}
        self._loads: list[tuple[Operation, Completion | None]] = []
        self.verified_blocks = 0
        """How many leading blocks of the last loads are right; once `is_loaded`."""
        self.failed_blocks: tuple[int, ...] = ()
        """The engine's blocks that the last loads did not fill; once `is_loaded`."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits, and nothing is under way."""
        return not (self._pending or self._under_way)

    @property
    def is_loaded(self) -> bool:
        """Whether no load is to be waited for."""
        return not self._loads

    @property
    def under_way(self) -> list[Operation]:
        """What the worker was told of, and has not answered."""
        return list(self._under_way.values())

    def add(self, operation: Operation) -> None:
        """Let it wait until the worker can be told."""
        self._pending.append(operation)
        if operation.kind is TransferKind.LOAD:
            self._loads.append((operation, None))

    def take(self) -> list[Operation]:
        """What waits, in order; it is under way from now on."""
        if not self._pending:
            return []
        taken, self._pending = self._pending, []
        self._under_way.update((operation.uuid, operation) for operation in taken)
        return taken

    def settle(self, completion: Completion) -> bool:
        """The worker answered. False for a transfer that is not under way: nothing changes."""
        operation = self._under_way.pop(completion.uuid, None)
        if operation is None:
            return False
        if operation.kind is TransferKind.LOAD:
            is_odd = any(i not in range(len(operation.blocks)) for i in completion.errors)
            self._settle_load(failed(operation, "unknown block") if is_odd else completion)
        return True

    def void(self) -> list[int]:
        """Forget everything; the uuids of what is under way, and must leave nothing behind."""
        self._pending.clear()
        voided = list(self._under_way)
        self._under_way.clear()
        return voided

    def drop_loads(self) -> None:
        """Loads that nobody was told of are not made."""
        dropped = [each for each in self._pending if each.kind is TransferKind.LOAD]
        self._pending = [each for each in self._pending if each.kind is not TransferKind.LOAD]
        for operation in dropped:
            self._settle_load(failed(operation, "cancelled"))

    def expire(self, reason: str) -> list[Operation]:
        """Wait no longer; what was under way, and may still be."""
        unknown = list(self._under_way.values())
        for operation in [*unknown, *self._pending]:
            if operation.kind is TransferKind.LOAD:
                self._settle_load(failed(operation, reason))
        self._under_way.clear()
        self._pending.clear()
        return unknown

    def _settle_load(self, completion: Completion) -> None:
        self._loads = [
            (load, completion if load.uuid == completion.uuid else known)
            for load, known in self._loads
        ]
        if all(known is not None for _, known in self._loads):
            self._close_loads()

    def _close_loads(self) -> None:
        """All loads settled: what came of them, in prompt order."""
        is_right: list[tuple[int, bool]] = []
        for load, completion in self._loads:
            assert completion is not None
            errors = completion.errors
            is_right += [(block, i not in errors) for i, block in enumerate(load.blocks)]
        self.failed_blocks = tuple(block for block, right in is_right if not right)
        wrong = (place for place, (_, right) in enumerate(is_right) if not right)
        self.verified_blocks = next(wrong, len(is_right))
        self._loads = []

"""The transfers of one request: pending, in flight, and the results of its loads.

add ─▶ pending ──take──▶ under way ──settle──▶ gone
          │                  │
          └── void, drop ────┴── expire ──▶ unknown   (see quarantine.py)
"""

from worker_agent.connector.slots.protocol import Completion, Operation, TransferKind, failed


class TransferLedger:
    """Transfers of a request; each settles once. All calls O(transfers) of the request."""

    __slots__ = ("_loads", "_pending", "_under_way", "failed_blocks", "verified_blocks")

    def __init__(self) -> None:
        self._pending: list[Operation] = []
        self._under_way: dict[int, Operation] = {}
        self._loads: list[tuple[Operation, Completion | None]] = []
        self.verified_blocks = 0
        """Number of leading blocks of the last loads that are right; valid once `is_loaded`."""
        self.failed_blocks: tuple[int, ...] = ()
        """The engine's blocks that the last loads did not fill; valid once `is_loaded`."""

    @property
    def is_settled(self) -> bool:
        """True if no transfer is pending or in flight."""
        return not (self._pending or self._under_way)

    @property
    def is_loaded(self) -> bool:
        """True if no load is waited for."""
        return not self._loads

    @property
    def under_way(self) -> list[Operation]:
        """Transfers sent to the worker and not completed."""
        return list(self._under_way.values())

    def add(self, operation: Operation) -> None:
        """Queue an operation until it can be sent to the worker."""
        self._pending.append(operation)
        if operation.kind is TransferKind.LOAD:
            self._loads.append((operation, None))

    def take(self) -> list[Operation]:
        """Return the pending transfers in order; they are in flight from then on."""
        if not self._pending:
            return []
        taken, self._pending = self._pending, []
        self._under_way.update((operation.uuid, operation) for operation in taken)
        return taken

    def settle(self, completion: Completion) -> bool:
        """Record a completion. Returns False, with no change, if the transfer is not in flight."""
        operation = self._under_way.pop(completion.uuid, None)
        if operation is None:
            return False
        if operation.kind is TransferKind.LOAD:
            is_odd = any(i not in range(len(operation.blocks)) for i in completion.errors)
            self._settle_load(failed(operation, "unknown block") if is_odd else completion)
        return True

    def void(self) -> list[int]:
        """Forget all transfers and return the uuids of those in flight.

        The results of the latter must be discarded.
        """
        self._pending.clear()
        voided = list(self._under_way)
        self._under_way.clear()
        return voided

    def drop_loads(self) -> None:
        """Cancel the loads that have not been sent to the worker."""
        dropped = [each for each in self._pending if each.kind is TransferKind.LOAD]
        self._pending = [each for each in self._pending if each.kind is not TransferKind.LOAD]
        for operation in dropped:
            self._settle_load(failed(operation, "cancelled"))

    def expire(self, reason: str) -> list[Operation]:
        """Stop waiting; return the transfers that were in flight and may still run."""
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
        """Record the results of the loads in prompt order, after all have settled."""
        is_right: list[tuple[int, bool]] = []
        for load, completion in self._loads:
            assert completion is not None
            errors = completion.errors
            is_right += [(block, i not in errors) for i, block in enumerate(load.blocks)]
        self.failed_blocks = tuple(block for block, right in is_right if not right)
        wrong = (place for place, (_, right) in enumerate(is_right) if not right)
        self.verified_blocks = next(wrong, len(is_right))
        self._loads = []

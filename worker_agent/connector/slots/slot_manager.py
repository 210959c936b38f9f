"""All slots of a connector by request key, and the quarantine of blocks of lost transfers.

They must not be used until the worker reports the transfer's end, or is gone with its memory.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

from msgspec.structs import replace

from router.errors import InvalidFieldError
from router.sequence.hashing.tokens import TokenBlockSequence, request_families
from router.sequence.hashing.tokens import salt_hash as salt_hash_of
from worker_agent.blocks.names import Naming
from worker_agent.connector.slots.block_groups import BlockGroups
from worker_agent.connector.slots.errors import (
    RequestKey,
    SlotNotFoundError,
    SlotOperationError,
    SlotStateError,
)
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.protocol import Completion, Operation
from worker_agent.connector.slots.slot import Slot
from worker_agent.connector.slots.slot_table import SlotState
from worker_agent.connector.slots.slot_transfers import SlotFacts


class Quarantine:
    """Blocks by the transfer that may access them. Calls are O(blocks of a transfer)."""

    __slots__ = ("_held", "released_blocks")

    def __init__(self) -> None:
        self._held: dict[int, Operation] = {}
        self.released_blocks = 0
        """Number of blocks released since the start."""

    def __len__(self) -> int:
        """Return the number of blocks in quarantine."""
        return sum(len(operation.blocks) for operation in self._held.values())

    def add(self, operations: Sequence[Operation]) -> None:
        """Add the blocks of transfers that may still be running."""
        self._held.update((operation.uuid, operation) for operation in operations)

    def release(self, uuid: int) -> Operation | None:
        """Release the blocks of a completed transfer and return it, or None if it is unknown."""
        operation = self._held.pop(uuid, None)
        self.released_blocks += 0 if operation is None else len(operation.blocks)
        return operation

    def uuids_of(self, key: RequestKey) -> list[int]:
        """Return the uuids of this request's transfers. O(transfers here)."""
        return [uuid for uuid, operation in self._held.items() if operation.key == key]

    def release_of(self, key: RequestKey) -> None:
        """Release all blocks of a request that the worker no longer follows. O(transfers here)."""
        for uuid in self.uuids_of(key):
            self.release(uuid)

    def release_all(self) -> None:
        """Release all blocks: the worker is gone, and its transfers with it."""
        for uuid in list(self._held):
            self.release(uuid)

    def keys(self) -> set[RequestKey]:
        """Return the requests that have blocks here."""
        return {operation.key for operation in self._held.values()}


DEADLINE_S = 30.0


class SlotManager:
    """The slots of all requests, one for each. Callers share a slot, and use it under `lock`.

    Invariant: a slot that is over becomes Finished within the deadline, provided that `expire` is
    called. The blocks of transfers that are not waited for any more are in `quarantine` until these
    have ended.
    """

    __slots__ = ("_facts", "_slots", "lock", "quarantine")

    def __init__(
        self,
        groups: BlockGroups,
        naming: Naming,
        tiers: Sequence[LowerTier] = (),
        deadline_s: float = DEADLINE_S,
        lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008 it has no state
    ) -> None:
        """Create an empty manager. Raises InvalidFieldError.

        `lock`: a reentrant lock.
        """
        if not deadline_s > 0:
            raise InvalidFieldError("deadline_s", f"{deadline_s}", "above 0")
        self._facts = SlotFacts(groups, tuple(tiers), naming, count(1), deadline_s)
        self._slots: dict[RequestKey, Slot] = {}
        self.quarantine = Quarantine()
        self.lock = lock

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def groups(self) -> BlockGroups:
        """The engine's KV cache groups."""
        return self._facts.groups

    def rename(self, naming: Naming) -> None:
        """Use this naming for the blocks of slots created from now on."""
        self._facts = replace(self._facts, naming=naming)

    def slots(self) -> Iterable[Slot]:
        """Return all slots in order of creation."""
        return self._slots.values()

    def has_slot(self, key: RequestKey) -> bool:
        """Return whether a request has a slot."""
        return key in self._slots

    def create_slot(
        self,
        key: RequestKey,
        tokens: Sequence[int],
        salt_hash: int | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Slot:
        """Create the slot of a prompt. O(tokens).

        `salt_hash`: must be that of the LoRA adapter and salt, from which blocks are named; None:
        not checked. Raises SlotOperationError if the key has a slot, or the tokens are missing or
        invalid.
        """
        if type(key) not in {str, int} or (isinstance(key, int) and key < 0):
            raise SlotOperationError(key, "key", f"{key!r}", "a string, or an integer from 0 on")
        if key in self._slots:
            raise SlotOperationError(key, "key", "it has a slot", "a request without a slot")
        if not tokens:
            raise SlotOperationError(key, "tokens", "none", "at least one")
        if salt_hash not in {None, salt_hash_of(lora_name, cache_salt)}:
            allowed = "that of lora_name and cache_salt"
            raise SlotOperationError(key, "salt_hash", f"{salt_hash}", allowed)
        families = request_families(lora_name, cache_salt)
        try:
            sequence = TokenBlockSequence(tokens, self._facts.groups.unit, families)
        except InvalidFieldError as error:
            raise SlotOperationError(key, "tokens", error.reason, error.allowed) from error
        root = self._facts.naming.root(lora_name, cache_salt)
        slot = self._slots[key] = Slot(key, sequence, root, self._facts)
        return slot

    def get_slot(self, key: RequestKey) -> Slot:
        """Return the slot of a request, shared by all callers. Raises SlotNotFoundError."""
        slot = self._slots.get(key)
        if slot is None:
            raise SlotNotFoundError(key)
        return slot

    def remove_slot(self, key: RequestKey, *, is_forced: bool = False) -> None:
        """Remove the slot of a Finished request; if `is_forced`, of any, and release what it holds.

        Raises SlotNotFoundError, SlotStateError.
        """
        slot = self.get_slot(key)
        if not is_forced and slot.state is not SlotState.FINISHED:
            raise SlotStateError(key, "remove", slot.state, "only a Finished slot can be removed")
        self.quarantine.add(slot.abandon())
        del self._slots[key]

    def settle(self, key: RequestKey, completion: Completion) -> bool:
        """Record a completion; return False if it is unknown, repeated or of a voided transfer."""
        slot = self._slots.get(key)
        if slot is not None and slot.settle(completion):
            return True
        return self.quarantine.release(completion.uuid) is not None

    def expire(self, now_s: float) -> list[Slot]:
        """Stop waiting for late transfers, and return the slots with late transfers. O(slots)."""
        late = [slot for slot in self._slots.values() if slot.is_late(now_s)]
        for slot in late:
            self.quarantine.add(slot.expire(now_s))
        return late

"""All slots of a connector, by the key of their request."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

from msgspec.structs import replace

from router.errors import InvalidFieldError
from router.sequence.block_families import request_families
from router.sequence.block_families import salt_hash as salt_hash_of
from router.sequence.tokens import TokenBlockSequence
from router.slot_errors import RequestKey, SlotNotFoundError, SlotOperationError, SlotStateError
from worker_agent.blocks.names import Naming
from worker_agent.connector.holding import LowerTier
from worker_agent.connector.protocol import Completion
from worker_agent.connector.quarantine import Quarantine
from worker_agent.connector.slot import Slot
from worker_agent.connector.slot_table import SlotState
from worker_agent.connector.slot_transfers import SlotFacts

DEADLINE_S = 30.0


class SlotManager:
    """A slot a request; whoever gets one gets the same, and uses it under `lock`.

    Invariant: a slot that is over leads to Finished within the deadline, as long as somebody calls
    `expire`; blocks whose transfers were not waited for are in `quarantine` until they are known.
    """

    __slots__ = ("_facts", "_slots", "lock", "quarantine")

    def __init__(
        self,
        block_size: int,
        naming: Naming,
        tiers: Sequence[LowerTier] = (),
        deadline_s: float = DEADLINE_S,
        lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008 it has no state
    ) -> None:
        """`lock`: one that may be taken again by its holder. Raises InvalidFieldError."""
        if block_size < 1:
            raise InvalidFieldError("block_size", f"{block_size}", "at least 1 token")
        if not deadline_s > 0:
            raise InvalidFieldError("deadline_s", f"{deadline_s}", "above 0")
        self._facts = SlotFacts(block_size, tuple(tiers), naming, count(1), deadline_s)
        self._slots: dict[RequestKey, Slot] = {}
        self.quarantine = Quarantine()
        self.lock = lock

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._facts.block_size

    def rename(self, naming: Naming) -> None:
        """Blocks of slots that are created from now on have these names."""
        self._facts = replace(self._facts, naming=naming)

    def slots(self) -> Iterable[Slot]:
        """All of them, first come first."""
        return self._slots.values()

    def has_slot(self, key: RequestKey) -> bool:
        """Whether a request has one."""
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
        """A slot for a prompt. O(tokens).

        `salt_hash`: where the caller has one; it must be that of the LoRA and salt, for blocks are
        named by these. Raises SlotOperationError for a key that has a slot, no tokens, odd ones.
        """
        if type(key) not in {str, int} or (isinstance(key, int) and key < 0):
            raise SlotOperationError(key, "key", f"{key!r}", "a string, or an integer from 0 on")
        if key in self._slots:
            raise SlotOperationError(key, "key", "it has a slot", "a request without one")
        if not tokens:
            raise SlotOperationError(key, "tokens", "none", "at least one")
        if salt_hash not in {None, salt_hash_of(lora_name, cache_salt)}:
            allowed = "that of lora_name and cache_salt"
            raise SlotOperationError(key, "salt_hash", f"{salt_hash}", allowed)
        families = request_families(lora_name, cache_salt)
        try:
            sequence = TokenBlockSequence(tokens, self._facts.block_size, families)
        except InvalidFieldError as error:
            raise SlotOperationError(key, "tokens", error.reason, error.allowed) from error
        root = self._facts.naming.root(lora_name, cache_salt)
        slot = self._slots[key] = Slot(key, sequence, root, self._facts)
        return slot

    def get_slot(self, key: RequestKey) -> Slot:
        """The slot of a request, shared by all who ask. Raises SlotNotFoundError."""
        slot = self._slots.get(key)
        if slot is None:
            raise SlotNotFoundError(key)
        return slot

    def remove_slot(self, key: RequestKey, *, is_forced: bool = False) -> None:
        """Forget a request that is Finished; forced, any, with what it holds.

        Raises SlotNotFoundError, SlotStateError.
        """
        slot = self.get_slot(key)
        if not is_forced and slot.state is not SlotState.FINISHED:
            raise SlotStateError(key, "remove", slot.state, "only what is Finished is removed")
        self.quarantine.add(slot.abandon())
        del self._slots[key]

    def settle(self, key: RequestKey, completion: Completion) -> bool:
        """The worker answered; False for what nobody waits for (unknown, doubled, voided)."""
        slot = self._slots.get(key)
        if slot is not None and slot.settle(completion):
            return True
        return self.quarantine.release(completion.uuid) is not None

    def expire(self, now_s: float) -> list[Slot]:
        """Wait no longer than the deadlines; the slots that this changed. O(slots)."""
        late = [slot for slot in self._slots.values() if slot.is_late(now_s)]
        for slot in late:
            self.quarantine.add(slot.expire(now_s))
        return late

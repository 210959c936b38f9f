"""What a leader told its worker: of which requests, which transfers, and which of them are void."""

from collections.abc import Iterable, Sequence

from router.slot_errors import RequestKey
from worker_agent.connector.protocol import NewSlot, Operation, StepPlan
from worker_agent.connector.slot import Slot
from worker_agent.connector.slot_table import SlotState


class ToldWorker:
    """Invariant: the worker follows exactly the requests told of, until it says that it does not.

    Transfers that are not waited for any more are void: the next plan says so before the worker
    touches a block, for the engine may write over theirs.
    """

    __slots__ = ("_keys", "_told", "_voided")

    def __init__(self) -> None:
        self._keys: dict[int, RequestKey] = {}
        self._told: set[RequestKey] = set()
        self._voided: list[int] = []

    def __contains__(self, key: RequestKey) -> bool:
        """Whether the worker follows this request, and so will name it."""
        return key in self._told

    def plan(self, iteration: int, slots: Sequence[Slot]) -> StepPlan:
        """In the order of these, what each wants moved."""
        new_slots: list[NewSlot] = []
        operations: list[Operation] = []
        is_decoding = False
        for slot in slots:
            is_decoding = is_decoding or slot.state is SlotState.DECODING
            taken = slot.take_pending_operations()
            if taken:
                self._tell(slot.key, taken, new_slots)
                operations += taken
        voided, self._voided = self._voided, []
        return StepPlan(iteration, new_slots, operations, is_decoding, voided)

    def void(self, uuids: Iterable[int]) -> None:
        """Their results must not be kept."""
        self._voided += uuids

    def answered(self, uuid: int) -> RequestKey | None:
        """Whose transfer is over; None for one that it was not told of, or that was over."""
        return self._keys.pop(uuid, None)

    def over(self, key: RequestKey) -> None:
        """It does not follow this request any more."""
        self._told.discard(key)

    def gone(self) -> None:
        """It is not there any more; the next one was told nothing."""
        self._keys.clear()
        self._told.clear()
        self._voided.clear()

    def _tell(self, key: RequestKey, taken: list[Operation], new_slots: list[NewSlot]) -> None:
        immediate = sum(1 for each in taken if each.requirement is None)
        if immediate or key not in self._told:
            new_slots.append(NewSlot(key, immediate))
        self._told.add(key)
        self._keys.update((each.uuid, key) for each in taken)

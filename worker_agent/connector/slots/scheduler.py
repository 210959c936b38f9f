"""Schedules transfers: one runs once both sides know it and the engine has passed what it reads.

    the block mover      ──request_from_leader──┐
                                                ├─▶ both here ─▶ requirement met ─▶ EXECUTE
    the worker's slot    ──request_from_worker──┘                                   (or CANCEL)

The sides come in either order. An immediate transfer waits for nothing, and may be over before its
slot is created. No side effects: `take_decisions` returns the decisions. Source: the transfer
scheduler of Dynamo's connectors, in which completions are a count and cannot fail.
"""

from msgspec import Struct

from worker_agent.connector.slots.errors import (
    RequestKey,
    SlotNotFoundError,
    SlotOperationError,
    SlotStateError,
)
from worker_agent.connector.slots.progress import Progress
from worker_agent.connector.slots.protocol import (
    LeaderTransferRequest,
    RequestType,
    SchedulingDecision,
    WorkerTransferRequest,
)

MAX_WAITING = 65_536


class Decided(Struct, frozen=True):
    """The decision on a transfer."""

    uuid: int
    decision: SchedulingDecision


class _Meeting:
    """A transfer known to one side, or to both."""

    __slots__ = ("is_worker_here", "key", "leader")

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.leader: LeaderTransferRequest | None = None
        self.is_worker_here = False


class _Slot:
    """A request's transfers: expected immediate ones, and scheduled ones in progress."""

    __slots__ = ("expected", "over", "scheduled")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.scheduled: set[int] = set()
        self.over: set[int] = set()

    @property
    def is_complete(self) -> bool:
        return not self.scheduled and self.expected <= 0

    def complete(self, uuid: int) -> bool:
        """Mark a transfer as over; return False if it already was."""
        if uuid in self.over:
            return False
        self.over.add(uuid)
        if uuid in self.scheduled:
            self.scheduled.remove(uuid)
        else:
            self.expected -= 1
        return True


class TransferScheduler:
    """Transfers of one worker, by uuid. All calls are O(1), except `advance`: O(waiting).

    Invariants: every transfer is decided once; a slot is complete once each of its transfers is
    over, with any result.
    """

    __slots__ = ("_decided", "_early", "_max_waiting", "_meetings", "_slots", "progress")

    def __init__(self, progress: Progress, max_waiting: int = MAX_WAITING) -> None:
        """Create an empty scheduler.

        `max_waiting`: limit of transfers that wait for their other side; beyond it, new ones are
        cancelled.
        """
        self._max_waiting = max_waiting
        self._meetings: dict[int, _Meeting] = {}
        self._decided: list[Decided] = []
        self._slots: dict[RequestKey, _Slot] = {}
        self._early: dict[RequestKey, set[int]] = {}
        self.progress = progress

    @property
    def undecided(self) -> list[int]:
        """The transfers that wait for their other side, or for the engine's progress."""
        return list(self._meetings)

    # ── Slots ────────────────────────────────────────────────────────────────────────────────────

    def has_slot(self, key: RequestKey) -> bool:
        """Return whether this request is followed."""
        return key in self._slots

    def create_slot(self, key: RequestKey, immediate: int) -> None:
        """Follow a request; `immediate` transfers are expected, which may be over already.

        Raises SlotOperationError if the request is already followed.
        """
        if key in self._slots:
            raise SlotOperationError(key, "key", "it is followed", "a request that is not")
        slot = self._slots[key] = _Slot(immediate)
        for uuid in self._early.pop(key, set()):
            slot.complete(uuid)

    def expect(self, key: RequestKey, immediate: int) -> None:
        """Expect `immediate` further immediate transfers. Raises SlotNotFoundError."""
        self._slot(key).expected += immediate

    def is_complete(self, key: RequestKey) -> bool:
        """Return whether all transfers of a request are over; True if it is not followed."""
        slot = self._slots.get(key)
        return slot is None or slot.is_complete

    def remove_slot(self, key: RequestKey) -> None:
        """Forget a request without open transfers. Raises SlotNotFoundError, SlotStateError."""
        if not self._slot(key).is_complete:
            raise SlotStateError(key, "remove", "incomplete", "transfers are under way")
        self.forget(key)

    def forget(self, key: RequestKey) -> None:
        """Stop following a request, and cancel its waiting transfers. O(waiting)."""
        self._slots.pop(key, None)
        self._early.pop(key, None)
        for uuid in [uuid for uuid, meeting in self._meetings.items() if meeting.key == key]:
            self.cancel(uuid)

    def completed(self, key: RequestKey, uuid: int) -> bool:
        """Mark a transfer as over; return False if it already was.

        A transfer that ends before its slot is created is credited to the slot later.
        """
        slot = self._slots.get(key)
        if slot is not None:
            return slot.complete(uuid)
        if key not in self._early and len(self._early) >= self._max_waiting:
            del self._early[next(iter(self._early))]
        early = self._early.setdefault(key, set())
        is_new = uuid not in early
        early.add(uuid)
        return is_new

    # ── Meeting ──────────────────────────────────────────────────────────────────────────────────

    def request_from_leader(self, request: LeaderTransferRequest) -> None:
        """Register a transfer as ready to run. Raises SlotOperationError if it is repeated."""
        if request.request_type is RequestType.IMMEDIATE:
            self._decided.append(Decided(request.uuid, SchedulingDecision.EXECUTE))
            return
        slot = self._slots.get(request.key)
        meeting = self._meeting(request.key, request.uuid)
        if meeting is None or (slot is not None and request.uuid in slot.over):
            self._settle(request.uuid, SchedulingDecision.CANCEL)
            return
        if meeting.leader is not None:
            raise _twice(request.key, request.uuid, "leader")
        meeting.leader = request
        self._decide(request.uuid, meeting)

    def request_from_worker(self, request: WorkerTransferRequest) -> None:
        """Register a transfer of a slot; an immediate one is already in the expected number.

        Raises SlotOperationError if it is repeated, and SlotNotFoundError for an unknown request.
        """
        slot = self._slot(request.key)
        if request.request_type is RequestType.IMMEDIATE:
            return
        if request.uuid in slot.scheduled or request.uuid in slot.over:
            raise _twice(request.key, request.uuid, "worker")
        slot.scheduled.add(request.uuid)
        meeting = self._meeting(request.key, request.uuid)
        if meeting is None:
            self._settle(request.uuid, SchedulingDecision.CANCEL)
            return
        meeting.is_worker_here = True
        self._decide(request.uuid, meeting)

    def cancel(self, uuid: int) -> bool:
        """Cancel a transfer; return False if it is already decided, or unknown."""
        if uuid not in self._meetings:
            return False
        self._settle(uuid, SchedulingDecision.CANCEL)
        return True

    def advance(self) -> None:
        """Decide the waiting transfers of which the engine's progress now meets the requirement."""
        for uuid, meeting in list(self._meetings.items()):
            self._decide(uuid, meeting)

    def take_decisions(self) -> list[Decided]:
        """Return the decisions since the last call, in order."""
        decided, self._decided = self._decided, []
        return decided

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _slot(self, key: RequestKey) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            raise SlotNotFoundError(key)
        return slot

    def _meeting(self, key: RequestKey, uuid: int) -> _Meeting | None:
        """Return the meeting of a transfer's sides, or None if the limit is reached."""
        meeting = self._meetings.get(uuid)
        if meeting is None and len(self._meetings) < self._max_waiting:
            meeting = self._meetings[uuid] = _Meeting(key)
        return meeting

    def _decide(self, uuid: int, meeting: _Meeting) -> None:
        if meeting.leader is None or not meeting.is_worker_here:
            return
        requirement = meeting.leader.requirement
        if requirement is None or self.progress.is_past(requirement):
            self._settle(uuid, SchedulingDecision.EXECUTE)

    def _settle(self, uuid: int, decision: SchedulingDecision) -> None:
        self._meetings.pop(uuid, None)
        self._decided.append(Decided(uuid, decision))


def _twice(key: RequestKey, uuid: int, side: str) -> SlotOperationError:
    return SlotOperationError(key, "uuid", f"{uuid}, twice from its {side}", "once from each side")

"""When a transfer may run: once both sides know of it, and the engine is past what it reads.

    whoever moves blocks ──request_from_leader──┐
                                                ├─▶ both here ─▶ requirement met ─▶ EXECUTE
    the worker's slot    ──request_from_worker──┘                                   (or CANCEL)

The sides come in either order; an immediate transfer waits for nothing, and may be over before its
slot is there. Pure; what was decided is taken with `take_decisions`. Source: the transfer scheduler
of Dynamo's connectors, whose completions are a count and cannot fail.
"""

from msgspec import Struct

from router.slot_errors import RequestKey, SlotNotFoundError, SlotOperationError, SlotStateError
from worker_agent.connector.progress import Progress
from worker_agent.connector.protocol import (
    LeaderTransferRequest,
    RequestType,
    SchedulingDecision,
    WorkerTransferRequest,
)

MAX_WAITING = 65_536


class Decided(Struct, frozen=True):
    """A transfer runs, or never will."""

    uuid: int
    decision: SchedulingDecision


class _Meeting:
    """A transfer that one side knows of, or both."""

    __slots__ = ("is_worker_here", "key", "leader")

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.leader: LeaderTransferRequest | None = None
        self.is_worker_here = False


class _Slot:
    """A request's transfers: how many immediate ones are to come, which others are under way."""

    __slots__ = ("expected", "over", "scheduled")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.scheduled: set[int] = set()
        self.over: set[int] = set()

    @property
    def is_complete(self) -> bool:
        return not self.scheduled and self.expected <= 0

    def complete(self, uuid: int) -> bool:
        """It is over; False if it was."""
        if uuid in self.over:
            return False
        self.over.add(uuid)
        if uuid in self.scheduled:
            self.scheduled.remove(uuid)
        else:
            self.expected -= 1
        return True


class TransferScheduler:
    """Transfers of one worker, by uuid. All calls O(1), but `advance`, which is O(waiting).

    Invariants: every transfer is decided once; a slot is complete once each of its transfers is
    over, whatever came of it.
    """

    __slots__ = ("_decided", "_early", "_max_waiting", "_meetings", "_slots", "progress")

    def __init__(self, progress: Progress, max_waiting: int = MAX_WAITING) -> None:
        """`max_waiting`: beyond so many that wait for their other side, new ones are cancelled."""
        self._max_waiting = max_waiting
        self._meetings: dict[int, _Meeting] = {}
        self._decided: list[Decided] = []
        self._slots: dict[RequestKey, _Slot] = {}
        self._early: dict[RequestKey, set[int]] = {}
        self.progress = progress

    @property
    def waiting(self) -> int:
        """Transfers that are not decided."""
        return len(self._meetings)

    @property
    def early_slots(self) -> int:
        """Requests of which something was over before they were followed."""
        return len(self._early)

    # ── Slots ────────────────────────────────────────────────────────────────────────────────────

    def has_slot(self, key: RequestKey) -> bool:
        """Whether this request is followed."""
        return key in self._slots

    def create_slot(self, key: RequestKey, immediate: int) -> None:
        """Follow a request, with so many immediate transfers to expect, over already or not.

        Raises SlotOperationError for one that is followed.
        """
        if key in self._slots:
            raise SlotOperationError(key, "key", "it is followed", "a request that is not")
        slot = self._slots[key] = _Slot(immediate)
        for uuid in self._early.pop(key, set()):
            slot.complete(uuid)

    def expect(self, key: RequestKey, immediate: int) -> None:
        """So many immediate transfers more. Raises SlotNotFoundError."""
        self._slot(key).expected += immediate

    def is_complete(self, key: RequestKey) -> bool:
        """Whether all its transfers are over; of a request nobody follows, yes."""
        slot = self._slots.get(key)
        return slot is None or slot.is_complete

    def remove_slot(self, key: RequestKey) -> None:
        """Forget a request whose transfers are over. Raises SlotNotFoundError, SlotStateError."""
        if not self._slot(key).is_complete:
            raise SlotStateError(key, "remove", "incomplete", "transfers are under way")
        self.forget(key)

    def forget(self, key: RequestKey) -> None:
        """Follow a request no longer; what waits for it is cancelled. O(waiting)."""
        self._slots.pop(key, None)
        self._early.pop(key, None)
        for uuid in [uuid for uuid, meeting in self._meetings.items() if meeting.key == key]:
            self.cancel(uuid)

    def completed(self, key: RequestKey, uuid: int) -> bool:
        """A transfer is over; False if it was. One that came before its slot is credited to it."""
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
        """Whoever moves blocks is ready. Raises SlotOperationError the second time."""
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
        """The worker knows what is to be moved; what is immediate was expected already.

        Raises SlotOperationError the second time, SlotNotFoundError for a request nobody follows.
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
        """Never make this one; False if it is decided, or unknown."""
        if uuid not in self._meetings:
            return False
        self._settle(uuid, SchedulingDecision.CANCEL)
        return True

    def advance(self) -> None:
        """The engine got further: decide what waited for that."""
        for uuid, meeting in list(self._meetings.items()):
            self._decide(uuid, meeting)

    def take_decisions(self) -> list[Decided]:
        """What was decided since the last call, in order."""
        decided, self._decided = self._decided, []
        return decided

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _slot(self, key: RequestKey) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            raise SlotNotFoundError(key)
        return slot

    def _meeting(self, key: RequestKey, uuid: int) -> _Meeting | None:
        """Where the sides of a transfer meet; None if there is no room."""
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

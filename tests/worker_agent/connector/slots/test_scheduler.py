"""When a transfer may run: both sides, in any order, and the engine far enough."""

from itertools import permutations

import pytest

from router.errors import InvalidFieldError
from worker_agent.connector.slots.errors import (
    SlotNotFoundError,
    SlotOperationError,
    SlotStateError,
)
from worker_agent.connector.slots.progress import Progress
from worker_agent.connector.slots.protocol import (
    IterationComplete,
    LayerComplete,
    LayerNameComplete,
    LeaderTransferRequest,
    RequestType,
    SchedulingDecision,
    TransferKind,
    WorkerTransferRequest,
)
from worker_agent.connector.slots.scheduler import Decided, TransferScheduler

EXECUTE, CANCEL = SchedulingDecision.EXECUTE, SchedulingDecision.CANCEL
SCHEDULED, IMMEDIATE = RequestType.SCHEDULED, RequestType.IMMEDIATE


def scheduler_of(immediate=0, **options):
    scheduler = TransferScheduler(Progress(["a", "b"]), **options)
    scheduler.create_slot("r", immediate)
    scheduler.progress.begin(7)
    return scheduler


def from_leader(scheduler, uuid=1, requirement=None, request_type=SCHEDULED):
    scheduler.request_from_leader(LeaderTransferRequest("r", uuid, request_type, requirement))


def from_worker(scheduler, uuid=1, request_type=SCHEDULED, key="r"):
    kind = TransferKind.STORE
    scheduler.request_from_worker(WorkerTransferRequest(key, uuid, kind, request_type))


def finish_layer(scheduler):
    scheduler.progress.complete_layer("b")
    scheduler.advance()


def end(scheduler):
    scheduler.progress.end()
    scheduler.advance()


MET_BY = [
    (LayerComplete(1, 7), finish_layer),
    (LayerNameComplete("b", 7), finish_layer),
    (LayerComplete(0, 7), end),
    (IterationComplete(7), end),
    (IterationComplete(6), end),
]


@pytest.mark.parametrize(("requirement", "meet"), MET_BY)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_both_sides_and_the_requirement_in_any_order(requirement, meet, order):
    scheduler = scheduler_of()
    ways = [lambda each: from_leader(each, requirement=requirement), from_worker, meet]
    for place in order:
        assert scheduler.take_decisions() == []
        scheduler.advance()
        ways[place](scheduler)
    assert scheduler.take_decisions() == [Decided(1, EXECUTE)]
    assert len(scheduler.undecided) == 0


def test_without_a_requirement_both_sides_suffice():
    scheduler = scheduler_of()
    from_worker(scheduler)
    from_leader(scheduler)
    assert scheduler.take_decisions() == [Decided(1, EXECUTE)]


def test_an_immediate_transfer_waits_for_nothing():
    scheduler = scheduler_of(immediate=1)
    from_leader(scheduler, request_type=IMMEDIATE)
    assert scheduler.take_decisions() == [Decided(1, EXECUTE)]
    assert not scheduler.is_complete("r")
    from_worker(scheduler, request_type=IMMEDIATE)
    assert scheduler.completed("r", 1)
    assert not scheduler.completed("r", 1)
    assert scheduler.is_complete("r")


def test_transfer_finished_before_its_slot_is_credited():
    scheduler = scheduler_of()
    assert scheduler.completed("late", 5)
    assert not scheduler.completed("late", 5)
    assert scheduler.is_complete("late")
    scheduler.create_slot("late", 2)
    assert not scheduler.is_complete("late")
    assert not scheduler.completed("late", 5)
    assert scheduler.completed("late", 6)
    scheduler.remove_slot("late")


def test_a_slot_is_complete_once_all_its_transfers_are_over():
    scheduler = scheduler_of()
    from_worker(scheduler, 1)
    from_worker(scheduler, 2)
    with pytest.raises(SlotStateError, match="transfers are under way"):
        scheduler.remove_slot("r")
    scheduler.completed("r", 1)
    assert not scheduler.is_complete("r")
    scheduler.completed("r", 2)
    scheduler.remove_slot("r")
    assert not scheduler.has_slot("r")


def test_cancelled_before_it_is_decided():
    scheduler = scheduler_of()
    from_worker(scheduler)
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    scheduler.completed("r", 1)
    from_leader(scheduler)  # which did not know
    assert scheduler.take_decisions() == [Decided(1, CANCEL)] * 2
    assert len(scheduler.undecided) == 0


def test_transfers_of_a_forgotten_request_are_cancelled():
    scheduler = scheduler_of()
    from_leader(scheduler, 3)
    scheduler.forget("r")
    scheduler.forget("r")
    assert scheduler.take_decisions() == [Decided(3, CANCEL)]


def test_more_than_may_wait_are_cancelled():
    scheduler = scheduler_of(max_waiting=2)
    for uuid in range(3):
        from_worker(scheduler, uuid)
    assert scheduler.take_decisions() == [Decided(2, CANCEL)]
    for key in range(4):
        scheduler.completed(key, 1)
    for key in range(4):
        scheduler.create_slot(key, 1)
    assert [scheduler.is_complete(key) for key in range(4)].count(True) == 2


def test_invalid_operations_are_refused():
    scheduler = scheduler_of()
    from_worker(scheduler)
    with pytest.raises(SlotOperationError, match="1, twice from its worker"):
        from_worker(scheduler)
    from_leader(scheduler, 2)
    with pytest.raises(SlotOperationError, match="2, twice from its leader"):
        from_leader(scheduler, 2)
    with pytest.raises(SlotOperationError, match="it is followed"):
        scheduler.create_slot("r", 0)
    for lost in (scheduler.remove_slot, lambda key: scheduler.expect(key, 1)):
        with pytest.raises(SlotNotFoundError):
            lost("nobody")
    with pytest.raises(SlotNotFoundError):
        from_worker(scheduler, key="nobody")


def test_iterations_follow_each_other():
    progress = Progress(["a"])
    progress.begin(5)
    with pytest.raises(InvalidFieldError, match=r"iteration: 7 \(allowed: 6\)"):
        progress.begin(7)
    with pytest.raises(InvalidFieldError, match=r"layer: x \(allowed: a\)"):
        progress.complete_layer("x")
    progress.complete_layer("a")
    progress.begin(6)
    assert not progress.is_past(LayerComplete(0, 6))
    assert not progress.is_past(LayerComplete(0, 5))  # it was never ended

"""Requests of models without a worker: which wait, for how long, and what ends their wait."""

import pytest

from router.core.commands import (
    Admit,
    Free,
    OrderWorker,
    RemoveWorker,
    Select,
    Submit,
    Tick,
    Withdraw,
)
from router.core.effects import AdmitWaiting, RefuseWaiting
from router.core.views.capacity import capacity
from router.core.views.workers import loads
from router.protocol.requests import SelectRequest
from router.protocol.values import Scope
from router.scheduler.errors import NoEndpointsError
from router.scheduler.queue.errors import QueueFullError, QueueTimeoutError
from router.scheduler.queue.waiting_room import Queueing
from router.sequence.active.errors import DuplicateReservationError
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

LISTED = Scope("llama", "default")
WAIT_S = 20.0


def world(**fields):
    limits = {"no_worker_wait_s": WAIT_S, "from_zero": (LISTED,)} | fields
    return World(queueing=Queueing(**limits))


def submit(world, request_id, now_s=0.0, model_name="llama", tokens=40, **fields):
    tokens = list(range(tokens))
    request = SelectRequest(
        token_ids=tokens, request_id=request_id, model_name=model_name, **fields
    )
    return world.core.handle(Submit(request, prepare(request, ())), now_s)[0]


def admitted(world, now_s):
    found = []
    while (admission := world.core.handle(Admit(), now_s)[0]) is not None:
        found.append((admission.request_id, admission.outcome.rank.worker_id))
    return found


def refusals(world, now_s):
    effects = world.core.handle(Tick(), now_s)[1]
    return [each.error for each in effects if isinstance(each, RefuseWaiting)]


def test_request_of_a_listed_model_waits_until_a_worker_comes():
    w = world()
    ticket = submit(w, "a")
    assert isinstance(ticket, int)
    assert isinstance(submit(w, "b", 1.0), int)
    assert AdmitWaiting() in w.core.handle(Tick(), 2.0)[1]
    assert admitted(w, 2.0) == []
    w.worker(1, 3.0, model_name="llama")
    assert AdmitWaiting() in w.core.handle(Tick(), 3.0)[1]
    assert admitted(w, 3.0) == [("a", 1), ("b", 1)]
    assert submit(w, "c", 3.0).rank.worker_id == 1
    w.core.waiting.check_invariants()
    assert len(w.core.waiting) == 0


def test_wait_ends_with_the_error_of_today_and_a_time_to_retry():
    w = world()
    submit(w, "a")
    submit(w, "short", max_wait_s=5.0)
    assert refusals(w, 4.9) == []
    (error,) = refusals(w, 5.0)
    assert (error.code, error.http_status, error.retry_after_s) == ("no_endpoints", 503, 5.0)
    assert "no schedulable workers within 5 s for model=llama" in str(error)
    (error,) = refusals(w, WAIT_S)
    assert error.retry_after_s == WAIT_S
    assert len(w.core.waiting) == 0


def test_model_that_lost_its_workers_waits_without_being_listed():
    w = world(from_zero=())
    w.worker(1, model_name="once")
    w.core.handle(Tick(), 0.1)
    w.core.handle(RemoveWorker(1, "removed"), 1.0)
    assert isinstance(submit(w, "a", 1.0, "once"), int)
    with pytest.raises(NoEndpointsError):
        submit(w, "b", 1.0, "never")


def test_cordoned_workers_are_waited_for_and_explained():
    w = world()
    w.worker(1, model_name="llama")
    w.core.handle(OrderWorker(1, "cordoned"), 0.0)
    assert isinstance(submit(w, "a"), int)
    w.core.handle(OrderWorker(1, None), 1.0)
    assert admitted(w, 1.0) == [("a", 1)]


@pytest.mark.parametrize(
    ("fields", "of_world"),
    [
        ({"model_name": "stranger"}, {}),
        ({"routing_group": "elsewhere"}, {}),
        ({"phase": "prefill"}, {}),
        ({}, {"no_worker_wait_s": 0.0, "threshold_frac": 1.0}),
    ],
    ids=["model", "routing group", "remote prefill", "off"],
)
def test_others_are_refused_at_once_and_leave_no_queue(fields, of_world):
    w = world(**of_world)
    with pytest.raises(NoEndpointsError) as refused:
        submit(w, "a", **fields)
    assert refused.value.retry_after_s is None
    assert w.core.waiting.queues() == []


def test_selection_never_waits():
    w = world()
    request = SelectRequest(token_ids=[1, 2], model_name="llama")
    with pytest.raises(NoEndpointsError):
        w.core.handle(Select(request, prepare(request, ())), 0.0)


@pytest.mark.parametrize("limit", [{"max_requests": 2}, {"max_tokens": 80}])
def test_requests_and_tokens_that_wait_are_limited(limit):
    w = world(**limit)
    submit(w, "a")
    submit(w, "b")
    with pytest.raises(QueueFullError):
        submit(w, "c")
    assert w.core.waiting.usage(LISTED) == (2, 80)


def test_request_leaves_when_it_is_withdrawn_or_freed():
    w = world()
    ticket = submit(w, "a")
    with pytest.raises(DuplicateReservationError):
        submit(w, "a")
    assert w.core.handle(Withdraw(ticket), 1.0)[0]
    submit(w, "b")
    (effect,) = w.core.handle(Free("b"), 1.0)[1]
    assert effect.error.code == "withdrawn"
    assert len(w.core.waiting) == 0


def test_worker_that_is_busy_at_once_keeps_the_rest_in_the_queue():
    w = world(threshold_frac=0.0)
    for name in "abc":
        submit(w, name, tokens=40)
    w.worker(1, 1.0, model_name="llama")
    assert admitted(w, 1.0) == [("a", 1)]
    w.report_load(rank(1), WAIT_S)
    (first, second) = refusals(w, WAIT_S)
    assert isinstance(first, QueueTimeoutError)
    assert isinstance(second, QueueTimeoutError)


def test_waiting_requests_are_the_signal_to_scale_from_zero():
    w = world()
    (pool,) = capacity(w.core, 0.0)
    assert (pool.model_name, pool.workers, pool.workers_needed) == ("llama", 0, 0)
    submit(w, "a")
    (pool,) = capacity(w.core, 0.0)
    assert (pool.waiting_requests, pool.waiting_isl_tokens) == (1, 40)
    assert (pool.workers_needed, pool.workers_wanted) == (1, 1)
    (scope,) = loads(w.core)
    assert (scope.model_name, scope.loads, scope.pending_count) == ("llama", [], 1)


def test_listed_model_that_is_served_by_other_roles_has_their_pools_alone():
    w = world()
    w.worker(1, model_name="llama", role="prefill")
    w.worker(2, model_name="llama", role="decode")
    assert [pool.role for pool in capacity(w.core, 0.0)] == ["decode", "prefill"]
    for worker_id in (1, 2):
        w.core.handle(RemoveWorker(worker_id, "removed"), 1.0)
    assert [pool.role for pool in capacity(w.core, 1.0)] == ["decode", "prefill"]

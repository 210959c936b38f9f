"""All that wait, of all scopes, and what they asked."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.protocol.requests import RankTarget, SelectRequest
from router.protocol.values import Scope
from router.scheduler.queue.errors import QueueFullError, QueueTimeoutError, TenantQueueFullError
from router.scheduler.queue.waiting_room import Queueing, WaitingRoom
from router.sequence.active.prompt import Prompt
from support.chaos.fuzzing import examples

POLICIES = """
[models.m]
default_policy_family = "all"
uncached_isl_buckets = [{min_tokens = 0, bucket = "all"}]

[[models.m.policy_classes]]
name = "all_all"
policy_family = "all"
cache_bucket = "all"
prefill_busy_threshold = 0
request_queue_limit = 3
max_wait_s = 20.0

[[models.m.policy_classes]]
name = "agents"
quantum = 4
prefill_busy_threshold = 0
"""


def room(**limits):
    return WaitingRoom(Queueing(policy_file=POLICIES, **limits))


def asked(request_id="r", tokens=10, group="default", **fields):
    return SelectRequest(
        request_id=request_id, token_ids=[1] * tokens, model_name="m", routing_group=group, **fields
    )


def wait(room, request, now_s=0.0, index=0):
    room.queue(request.scope)
    return room.wait(request, Prompt(request), index, 4, 2, now_s)


def everywhere(*_):
    return True


def test_models_with_non_queueing_classes_have_no_queue():
    assert room().queue(Scope("other", "default")) is None
    assert room().queue(Scope("m", "default")) is not None


def test_taken_request_keeps_its_fields_without_tokens():
    here = room()
    request = asked(priority_jump=2.0)
    ticket, displaced = wait(here, request)
    assert displaced == []
    assert ("r" in here, here.tickets.get("r"), here.usage(request.scope)) == (
        True,
        ticket,
        (1, 10),
    )
    waiting, pending = here.take(everywhere, 0.0)
    assert (waiting.ticket, waiting.cached_tokens, waiting.cost_tokens) == (ticket, 4, 6)
    assert pending.request.token_ids is None
    assert (pending.request.priority_jump, pending.prompt.isl_tokens) == (2.0, 10)
    assert ("r" in here, len(here), here.tokens) == (False, 0, 0)


def test_admission_asks_the_request_and_its_class():
    here = room()
    wait(here, asked("a"))
    wait(here, asked("b", policy_class="agents"), index=1)
    seen = []

    def has_room(request, policy_class, part):
        seen.append((request.request_id, policy_class.name, part))
        return False

    assert here.take(has_room, 0.0) is None
    assert seen == [("a", "all_all", 1.0), ("b", "agents", 1.0)]


def test_scopes_wait_for_themselves():
    here = room()
    wait(here, asked("a", group="x"))
    wait(here, asked("b", group="y"))
    _, pending = here.take(lambda each, *_: each.routing_group == "y", 0.0)
    assert pending.request.request_id == "b"
    assert here.usage(Scope("m", "x")) == (1, 10)


def test_demands_are_lanes_of_their_own():
    here = room()
    wait(here, asked("pinned", pinned_worker=RankTarget(7)))
    wait(here, asked("other"))
    wait(here, asked("too", pinned_worker=RankTarget(7)))
    seen = []

    def has_room(request, *_):
        seen.append(request.request_id)
        return request.pinned_worker is None

    _, pending = here.take(has_room, 0.0)
    assert (pending.request.request_id, seen) == ("other", ["pinned", "other"])


def test_prefill_worker_is_a_lane_of_its_own():
    """Its labels may demand a location in which no rank has room."""
    here = room()
    wait(here, asked("near", prefill_worker_id=7))
    wait(here, asked("other"))
    _, pending = here.take(lambda each, *_: each.prefill_worker_id is None, 0.0)
    assert pending.request.request_id == "other"


def test_a_request_waits_as_long_as_it_wants_or_its_class_allows():
    here = room()
    short, _ = wait(here, asked("short", max_wait_s=5.0))
    long, _ = wait(here, asked("long", max_wait_s=90.0))
    assert here.expire(4.9) == []
    ((ticket, error),) = here.expire(5.0)
    assert (ticket, type(error), error.waited_s) == (short, QueueTimeoutError, 5.0)
    assert [ticket for ticket, _ in here.expire(20.0)] == [long]
    here.check_invariants()


@pytest.mark.parametrize(
    ("limits", "kind"), [({"max_requests": 2}, "requests"), ({"max_tokens": 20}, "isl_tokens")]
)
def test_all_queues_together_are_bounded(limits, kind):
    here = room(**limits)
    wait(here, asked("a", group="x"))
    wait(here, asked("b", group="y"))
    with pytest.raises(QueueFullError) as caught:
        wait(here, asked("c", group="z"))
    assert caught.value.limit_kind == kind
    assert here.withdraw(here.tickets["a"])
    wait(here, asked("c", group="z"))
    here.check_invariants()


def test_displaced_request_is_returned_with_its_error():
    here = room()
    tickets = [wait(here, asked(str(i), tenant="flood"))[0] for i in range(3)]
    _, ((ticket, error),) = wait(here, asked("new", tenant="small"))
    assert (ticket, type(error)) == (tickets[2], TenantQueueFullError)
    assert "2" not in here
    here.check_invariants()


class Consistent(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.room, self.now_s, self.live = room(max_requests=8), 0.0, {}

    @rule(request_id=st.sampled_from("abcdefghij"), group=st.sampled_from("xy"),
          tenant=st.sampled_from("pq"), index=st.integers(0, 1), tokens=st.integers(0, 30),
          max_wait_s=st.none() | st.integers(1, 30))  # fmt: skip
    def wait(self, request_id, group, tenant, index, tokens, max_wait_s):
        if request_id in self.live:
            return
        request = asked(request_id, tokens, group, tenant=tenant, max_wait_s=max_wait_s)
        try:
            ticket, displaced = wait(self.room, request, self.now_s, index)
        except (QueueFullError, TenantQueueFullError):
            return
        self.live[request_id] = ticket
        self.drop(each for each, _ in displaced)

    @rule(group=st.sampled_from("xy"))
    def take(self, group):
        waited, _ = self.room.usage(Scope("m", group))
        taken = self.room.take(lambda each, *_: each.routing_group == group, self.now_s)
        assert (taken is None) == (waited == 0)
        if taken is not None:
            assert taken[1].request.routing_group == group
            self.drop([taken[0].ticket])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def withdraw(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        ticket = self.live[request_id]
        assert self.room.withdraw(ticket)
        assert not self.room.withdraw(ticket)
        self.drop([ticket])

    @rule(passed_s=st.integers(0, 15))
    def pass_time(self, passed_s):
        self.now_s += passed_s
        self.drop(ticket for ticket, _ in self.room.expire(self.now_s))

    def drop(self, tickets):
        gone = set(tickets)
        assert gone <= set(self.live.values())
        self.live = {i: ticket for i, ticket in self.live.items() if ticket not in gone}

    @invariant()
    def holds(self):
        self.room.check_invariants()
        assert {i: self.room.tickets.get(i) for i in self.live} == self.live
        assert len(self.room) == len(self.live) <= 8


Consistent.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30)
TestConsistent = Consistent.TestCase

"""When a core has requests wait, and when it places them: rule by rule."""

from itertools import count

import pytest
from msgspec.structs import replace

from router.core.admission import Admission
from router.core.commands import (
    Admit,
    Free,
    PrefillComplete,
    Reconfigure,
    RemoveWorker,
    Submit,
    Tick,
    UpsertWorker,
    Withdraw,
)
from router.core.effects import AdmitWaiting, RefuseWaiting
from router.core.registered_workers import complete_worker
from router.protocol.requests import RankTarget, SelectRequest
from router.protocol.workers import WorkerRegistration
from router.scheduler.errors import NoEndpointsError
from router.scheduler.queue.errors import QueueFullError, QueueTimeoutError, WithdrawnError
from router.scheduler.queue.waiting_room import Queueing
from router.sequence.active.errors import DuplicateReservationError
from router.sequence.active.prompt import prepare
from router.sequence.active.stages import Stages
from support.values.builders import World, rank

WAKE = AdmitWaiting()


class Queue(World):
    """A core whose requests wait, and short names for its commands."""

    def submit(self, request_id, tokens=40, now_s=0.0, first=0, **fields):
        tokens = list(range(first, first + tokens))
        request = SelectRequest(token_ids=tokens, request_id=request_id, **fields)
        return self.core.handle(Submit(request, prepare(request, ())), now_s)

    def waits(self, request_id, tokens=40, now_s=0.0, **fields):
        ticket, effects = self.submit(request_id, tokens, now_s, **fields)
        assert isinstance(ticket, int)
        assert effects[-1] == WAKE
        return ticket

    def placed(self, request_id, tokens=40, now_s=0.0, **fields):
        placement, effects = self.submit(request_id, tokens, now_s, **fields)
        assert not isinstance(placement, int)
        assert WAKE not in effects
        return placement.rank

    def admitted(self, now_s=0.0):
        """All requests that can be placed, in order."""
        found = []
        while (admission := self.core.handle(Admit(), now_s)[0]) is not None:
            found.append(admission.request_id)
        return found


def world(threshold=1.0, workers=1, policy="fcfs", **fields):
    made = Queue(queueing=Queueing(threshold, policy))
    for worker_id in range(1, workers + 1):
        made.worker(worker_id, max_num_batched_tokens=100, **fields)
    return made


def test_without_a_threshold_nothing_ever_waits():
    w = world(threshold=None)
    for i in range(50):
        w.placed(f"r{i}", 100, first=1000 * i)


def test_a_rank_is_busy_strictly_above_the_threshold():
    w = world(threshold=1.0)
    w.placed("a", 100)
    w.placed("b", 1, first=500)
    w.waits("c", first=900)


def test_worker_without_a_batch_limit_is_hardly_ever_busy():
    registration = WorkerRegistration(worker_id=1, endpoint="http://w1", block_size=4)
    w = Queue(queueing=Queueing(0.001))
    w.core.handle(UpsertWorker(complete_worker(registration, 1)), 0.0)
    w.placed("a", 10_000)
    w.placed("b", 1, first=20_000)
    w.waits("c", 1, first=30_000)


def test_a_request_waits_only_while_every_rank_is_busy():
    w = world(threshold=0.0, workers=2)
    w.placed("a", first=0)
    w.placed("b", first=100)
    w.waits("c", first=200)
    w.core.handle(Free("a"), 0.0)
    assert w.admitted() == ["c"]


def test_cached_tokens_do_not_make_a_rank_busy():
    w = world(threshold=0.3)
    w.cache(rank(1), list(range(40)))
    w.placed("a", 48)
    w.placed("b", 40, first=1000)
    w.waits("c", 40, first=2000)


def test_only_ranks_that_may_serve_it_count():
    w = world(threshold=0.0, workers=2)
    w.placed("a", pinned_worker=RankTarget(1))
    w.waits("b", first=100, pinned_worker=RankTarget(1))
    w.waits("c", first=200)
    assert w.admitted() == ["c"]
    assert "c" not in w.core.waiting
    w.core.handle(PrefillComplete("a"), 0.0)
    assert w.admitted() == ["b"]


@pytest.mark.parametrize("command", [PrefillComplete, Free])
def test_prefill_completion_and_freeing_wake_waiting_requests(command):
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("b", first=100)
    assert w.admitted() == []
    assert WAKE in w.core.handle(command("a"), 0.0)[1]
    assert w.admitted() == ["b"]
    assert WAKE not in w.core.handle(Free("b"), 0.0)[1]


def test_expiry_and_new_workers_wake_waiting_requests_at_the_next_tick():
    w = Queue(queueing=Queueing(0.0), reservation_ttl_s=10.0)
    w.worker(1, max_num_batched_tokens=100)
    w.placed("a")
    w.waits("b", first=100)
    w.report_load(rank(1), 9.0)
    w.report_load(rank(1), 10.0)
    assert WAKE in w.core.handle(Tick(), 10.0)[1]
    assert w.admitted(10.0) == ["b"]
    w.waits("c", first=200, now_s=10.0)
    w.worker(2, 10.0, max_num_batched_tokens=100)
    assert WAKE in w.core.handle(Tick(), 10.1)[1]
    assert w.admitted(10.1) == ["c"]


def test_first_come_first_served_but_for_a_head_start_in_seconds():
    w = world(threshold=0.0)
    w.placed("a")
    for i, (request_id, jump) in enumerate([("b", 0.0), ("c", 0.0), ("d", 1.5), ("e", 0.5)]):
        w.waits(request_id, now_s=float(i), first=100 * i, priority_jump=jump)
    order = []
    for before in ("a", "b", "d", "c"):
        w.core.handle(Free(before), 5.0)
        order += w.admitted(5.0)
    assert order == ["b", "d", "c", "e"]


def test_the_stages_of_a_request_that_waited_are_those_of_its_decision():
    """A second passes at every look at the clock, and 100 in the queue."""
    w, clock_s = world(), count()
    w.placed("a", 101)
    stages = Stages(lambda: float(next(clock_s)))
    request = SelectRequest(token_ids=list(range(40)), request_id="b")
    ticket, _ = w.core.handle(Submit(request, prepare(request, (), stages)), 0.0)
    assert isinstance(ticket, int)
    for _ in range(100):
        next(clock_s)
    w.core.handle(Free("a"), 0.0)
    assert w.admitted() == ["b"]
    assert stages.waited_s == 101
    assert stages.total_s - stages.waited_s == sum(stages.seconds)
    assert stages.seconds == [1, 1, 1, 2]


def test_the_highest_strict_priority_goes_first_whatever_the_order():
    w = world(threshold=0.0, policy="wspt")
    w.placed("a")
    w.waits("short", 4, first=100)
    w.waits("urgent", 90, first=200, strict_priority=1)
    w.core.handle(Free("a"), 0.0)
    assert w.admitted() == ["urgent"]


def test_shortest_first_counts_uncached_tokens():
    w = world(threshold=0.0, policy="wspt")
    w.cache(rank(1), list(range(1000, 1080)))
    w.placed("a")
    w.waits("medium", 40, first=100)
    w.waits("long but cached", 84, first=1000)
    w.core.handle(Free("a"), 0.0)
    assert w.admitted()[0] == "long but cached"


def test_the_overlap_is_that_of_the_moment_it_is_placed():
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("b", 80, first=1000)
    w.cache(rank(1), list(range(1000, 1080)))
    w.core.handle(Free("a"), 0.0)
    admission = w.core.handle(Admit(), 7.0)[0]
    assert isinstance(admission, Admission)
    assert (admission.outcome.overlap_blocks, admission.waited_s) == (20, 7.0)


def test_new_requests_do_not_overtake_waiting_ones():
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("b", first=100)
    w.core.handle(Free("a"), 0.0)
    w.waits("c", first=200)
    assert w.admitted() == ["b"]


def test_waiting_request_without_eligible_workers_is_refused():
    w = world(threshold=0.0)
    w.placed("a")
    ticket = w.waits("b", first=100)
    assert WAKE in w.core.handle(RemoveWorker(1, "gone"), 0.0)[1]
    admission = w.core.handle(Admit(), 0.0)[0]
    assert (admission.ticket, admission.effects) == (ticket, [])
    assert isinstance(admission.outcome, NoEndpointsError)
    with pytest.raises(NoEndpointsError):
        w.submit("c")


def test_tick_refuses_requests_past_their_wait_limit():
    w = world(threshold=0.0)
    w.placed("a")
    ticket = w.waits("b", first=100, max_wait_s=2.0)
    assert not [each for each in w.core.handle(Tick(), 1.9)[1] if isinstance(each, RefuseWaiting)]
    (refused,) = [each for each in w.core.handle(Tick(), 2.0)[1] if isinstance(each, RefuseWaiting)]
    assert refused.ticket == ticket
    assert isinstance(refused.error, QueueTimeoutError)
    assert w.core.handle(Admit(), 2.0)[0] is None


def test_an_id_that_waits_is_taken_and_freeing_it_withdraws_it():
    w = world(threshold=0.0)
    w.placed("a")
    ticket = w.waits("b", first=100)
    with pytest.raises(DuplicateReservationError):
        w.submit("b")
    (refused,) = w.core.handle(Free("b"), 0.0)[1]
    assert (refused.ticket, type(refused.error)) == (ticket, WithdrawnError)
    assert not w.core.handle(Withdraw(ticket), 0.0)[0]
    w.core.waiting.check_invariants()


def test_immediate_placements_count_for_their_tenant():
    w = world(threshold=0.0, workers=3)
    for i in range(3):
        w.placed(f"many{i}", tenant="many", first=100 * i)
    w.waits("many3", tenant="many", first=300)
    w.waits("few", tenant="few", first=400)
    w.core.handle(Free("many0"), 0.0)
    assert w.admitted() == ["few"]


def requeue(world, now_s=0.0, **changes):
    queueing = replace(world.core.settings.queueing, **changes)
    settings = replace(world.core.settings, queueing=queueing)
    return world.core.handle(Reconfigure.of(settings), now_s)[1]


def test_a_changed_limit_of_the_queue_applies_to_the_next_request():
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("b", first=100)
    requeue(w, max_requests=1)
    with pytest.raises(QueueFullError):
        w.submit("c", first=200)
    requeue(w, max_requests=2)
    w.waits("c", first=200)
    w.core.waiting.check_invariants()


def test_requests_begin_to_wait_and_cease_to_with_the_threshold():
    w = world(threshold=None)
    w.placed("a", 100)
    assert requeue(w, threshold_frac=0.0) == []
    w.waits("b", first=200)
    assert requeue(w, threshold_frac=None) == [WAKE]
    assert w.admitted() == ["b"]
    w.placed("c", first=300)
    assert requeue(w, threshold_frac=0.0) == []
    w.waits("d", first=400)


def test_waiting_requests_follow_the_new_order_and_keep_their_time_limit():
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("long", 200, first=1000)
    w.waits("short", 10, now_s=0.1, first=2000)
    requeue(w, 0.2, policy="wspt", max_wait_s=0.5)
    w.core.waiting.check_invariants()
    assert w.core.handle(Tick(), 1.0)[1] == [WAKE]
    w.core.handle(Free("a"), 1.0)
    assert w.admitted(1.0) == ["short"]
    ticket = w.waits("new", now_s=1.0, first=3000)
    assert [each.ticket for each in w.core.handle(Tick(), 1.5)[1] if each != WAKE] == [ticket]


CLASSES = """
default_policy_family = "all"
uncached_isl_buckets = [{min_tokens = 0, bucket = "short"}, {min_tokens = 100, bucket = "long"}]
policy_classes = [
  {name = "s", policy_family = "all", cache_bucket = "short", prefill_busy_threshold = 0},
  {name = "l", policy_family = "all", cache_bucket = "long", prefill_busy_threshold = 0},
]
"""


def test_waiting_requests_move_to_the_new_classes():
    w = world(threshold=0.0)
    w.placed("a")
    w.waits("long", 200, first=1000)
    w.waits("short", 10, first=2000)
    requeue(w, policy_file=CLASSES)
    w.core.waiting.check_invariants()
    ((_, queue),) = w.core.waiting.queues()
    assert [(each.settings.name, len(each)) for each in queue.queues] == [("s", 1), ("l", 1)]
    w.core.handle(Free("a"), 0.0)
    admission = w.core.handle(Admit(), 0.0)[0]
    assert (admission.request_id, admission.policy_class) == ("short", "s")

"""Waiting requests and their order, against a naive queue."""

from functools import partial
from itertools import count, dropwhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.scheduler.queue.admission_queue import AdmissionQueue
from router.scheduler.queue.errors import QueueFullError, TenantQueueFullError
from router.scheduler.queue.fair_shares import HALF_LIFE_S
from router.scheduler.queue.flows import Waiting
from router.scheduler.queue.policy_classes import Classes, PolicyClass
from support.chaos.fuzzing import examples

TICKETS = count()


def queue_of(*quanta, **fields):
    classes = [PolicyClass(name=f"c{i}", quantum=q, **fields) for i, q in enumerate(quanta)]
    return AdmissionQueue(Classes(classes))


def waiting(cost=100, order=0.0, **fields):
    fields = {"ticket": next(TICKETS), "expires_s": 60.0, "isl_tokens": cost, **fields}
    return Waiting(order=order, **fields)


def free(*_):
    return True


def served(queue, is_free=free, now_s=0.0):
    """All that can go, in order."""
    taken = iter(lambda: queue.take(is_free, now_s), None)
    return list(taken)


def fill(queue, index, *requests):
    for each in requests:
        assert queue.push(each, index, 1, 0.0) == []
    return requests


# ── Within a class ───────────────────────────────────────────────────────────────────────────────


def test_the_lowest_order_goes_first_and_equals_as_they_came():
    queue = queue_of(1)
    late, early, second = fill(queue, 0, waiting(order=2.0), waiting(order=1.0), waiting(order=1.0))
    assert served(queue) == [early, second, late]
    assert len(queue) == 0


def test_room_below_the_threshold_is_for_tenants_with_less_service():
    """Half of it is taken: enough for a tenant with 100, not for one with 900."""
    queue = queue_of(1)
    for tenant, tokens in (("much", 900), ("little", 100)):
        queue.charge(0, tenant, "", tokens, 0.0)
    much, _ = fill(queue, 0, waiting(tenant="much"), waiting(tenant="little", cost=700))
    assert [each.tenant for each in served(queue, lambda _, __, part: part > 0.6)] == ["little"]
    assert much.ticket in queue
    alone = queue_of(1)
    alone.charge(0, "much", "", 900, 0.0)
    fill(alone, 0, waiting(tenant="much"))
    assert len(served(alone, lambda _, __, part: part > 0.6)) == 1


def test_strict_priority_goes_before_everything():
    queue = queue_of(1)
    queue.charge(0, "busy", "", 10_000, 0.0)
    plain = waiting(order=0.0, tenant="idle")
    urgent = waiting(order=9.0, tenant="busy", strict_priority=1)
    fill(queue, 0, plain, urgent)
    assert served(queue) == [urgent, plain]


def test_request_pinned_to_a_busy_rank_does_not_block_others():
    queue = queue_of(1)
    pinned, other = fill(queue, 0, waiting(order=0.0, lane="busy"), waiting(order=1.0))
    assert served(queue, lambda each, *_: each.lane != "busy") == [other]
    assert served(queue) == [pinned]


def test_tenant_with_the_least_recent_service_goes_first():
    queue = queue_of(1)
    many = fill(queue, 0, *(waiting(tenant="many") for _ in range(6)))
    few = fill(queue, 0, *(waiting(tenant="few") for _ in range(2)))
    assert served(queue) == [many[0], few[0], many[1], few[1], *many[2:]]


def test_immediate_service_counts_and_fades():
    queue = queue_of(1)
    queue.charge(0, "a", "", 500, 0.0)
    a = fill(queue, 0, *(waiting(tenant="a") for _ in range(2)))
    b = fill(queue, 0, *(waiting(tenant="b") for _ in range(2)))
    assert queue.take(free, 0.0) == b[0]
    assert queue.take(free, 0.0) == b[1]
    queue.charge(0, "b", "", 450, 6 * HALF_LIFE_S)
    c = fill(queue, 0, waiting(tenant="b"))
    assert served(queue, now_s=6 * HALF_LIFE_S) == [*a, *c]


# ── Between classes ──────────────────────────────────────────────────────────────────────────────


def test_tokens_are_shared_as_the_quanta():
    """512 to 128, as in Dynamo's demonstration: 254 to 257 and 63 to 66 of the first 320."""
    queue = queue_of(512, 128)
    fill(queue, 0, *(waiting(128) for _ in range(320)))
    fill(queue, 1, *(waiting(128) for _ in range(320)))
    first = [queue.take(free, 0.0) for _ in range(320)]
    assert sum(each.ticket < min(w.ticket for w in first) + 320 for each in first) == 256


def test_credit_of_one_visit_pays_for_several():
    """Quantum 10, cost 3: three in a visit, and the one token left counts for the next."""
    queue = queue_of(10, 10)
    a = fill(queue, 0, *(waiting(3) for _ in range(8)))
    b = fill(queue, 1, *(waiting(3) for _ in range(8)))
    assert served(queue)[:12] == [*a[:3], *b[:3], *a[3:6], *b[3:6]]


def test_a_request_that_costs_many_rounds_gets_them_at_once():
    """The worked example of Dynamo's manual: four more rounds let the second class go first."""
    queue = queue_of(1000, 2000)
    standard, latency = waiting(7000), waiting(9000)
    fill(queue, 0, standard)
    fill(queue, 1, latency, waiting(9000))
    assert queue.take(free, 0.0) == latency
    assert [each.deficit_tokens for each in queue.queues] == [5000, 1000]


def test_blocked_class_is_granted_no_deficit():
    queue = queue_of(10, 10)
    fill(queue, 0, waiting(1000, lane="x"))
    fill(queue, 1, *(waiting(10) for _ in range(50)))
    assert len(served(queue, lambda each, *_: each.lane != "x")) == 50
    assert queue.queues[0].deficit_tokens == 0


def test_thresholds_are_each_classs_own():
    queue = AdmissionQueue(
        Classes([PolicyClass(name=n, prefill_busy_threshold=t) for n, t in (("a", 1), ("b", 9))])
    )
    fill(queue, 0, waiting())
    (b,) = fill(queue, 1, waiting())
    assert served(queue, lambda _, settings, __: settings.prefill_busy_threshold > 5) == [b]


class Naive:
    """The rules of deficit round robin, one round after the other; state as they name it."""

    def __init__(self, quanta):
        self.quanta, self.deficits = quanta, [0] * len(quanta)
        self.cursor, self.is_visiting = 0, False

    def leave(self, index):
        self.deficits[index] = 0
        if index == self.cursor:
            self.advance()

    def advance(self):
        self.cursor = (self.cursor + 1) % len(self.quanta)
        self.is_visiting = False

    def next(self, costs):
        while any(costs):
            cost = costs[self.cursor]
            if cost is not None:
                if not self.is_visiting and self.deficits[self.cursor] < cost:
                    self.deficits[self.cursor] += self.quanta[self.cursor]
                self.is_visiting = True
                if self.deficits[self.cursor] >= cost:
                    self.deficits[self.cursor] -= cost
                    return self.cursor
            self.advance()
        return None


OWN = st.sampled_from(["", "p", "q"])


class Consistent(RuleBasedStateMachine):
    """Three classes; lanes that are free or not; shares of tenants and ids, counted naively."""

    quanta = (5, 30, 100)

    def __init__(self):
        super().__init__()
        self.queue, self.naive = queue_of(*self.quanta), Naive(self.quanta)
        self.now_s, self.live, self.given = 0.0, {}, []
        self.busy = set()

    @rule(index=st.integers(0, 2), tenant=st.sampled_from("ab"), own=OWN,
          lane=st.sampled_from("xyz"), priority=st.integers(0, 1), order=st.integers(0, 3),
          cost=st.integers(1, 400), cached=st.integers(0, 20),
          patience_s=st.integers(1, 60))  # fmt: skip
    def push(self, index, tenant, own, lane, priority, order, cost, cached, patience_s):
        request = waiting(
            cost + cached, order, tenant=tenant, fair_share_id=own, lane=lane,
            strict_priority=priority,
            cached_tokens=cached, since_s=self.now_s, expires_s=self.now_s + patience_s,
        )  # fmt: skip
        assert self.queue.push(request, index, 1, self.now_s) == []
        self.live[request.ticket] = (index, request)

    @rule(index=st.integers(0, 2), tenant=st.sampled_from("ab"), own=OWN, cost=st.integers(0, 300))
    def send_without_waiting(self, index, tenant, own, cost):
        self.queue.charge(index, tenant, own, cost, self.now_s)
        self.given.append((index, tenant, own, max(1, cost), self.now_s))

    @rule(lane=st.sampled_from("xyz"))
    def toggle(self, lane):
        self.busy ^= {lane}

    @rule(times=st.integers(1, 4))
    def take(self, times):
        for _ in range(times):
            heads = [self.head(index) for index in range(3)]
            index = self.naive.next([head and head.cost_tokens for head in heads])
            expected = None if index is None else heads[index]
            taken = self.queue.take(lambda each, *_: each.lane not in self.busy, self.now_s)
            assert taken == expected
            if expected is not None:
                names = expected.tenant, expected.fair_share_id
                self.given.append((index, *names, expected.cost_tokens, self.now_s))
                self.drop(expected.ticket)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def withdraw(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.live)))
        assert self.queue.withdraw(ticket).ticket == ticket
        assert self.queue.withdraw(ticket) is None
        self.drop(ticket)

    @rule(passed_s=st.sampled_from([0.0, 1.0, 10.0, 25.0]))
    def wait(self, passed_s):
        self.now_s += passed_s
        late = sorted(
            (each.expires_s, ticket)
            for ticket, (_, each) in self.live.items()
            if each.expires_s <= self.now_s
        )
        expired = self.queue.expire(self.now_s)
        assert [(each.expires_s, each.ticket) for each, _ in expired] == late
        for each, error in expired:
            assert error.waited_s == self.now_s - each.since_s
            self.drop(each.ticket)

    def head(self, index):
        """The next request of a class, by its definition."""
        here = [each for at, each in self.live.values() if at == index]
        flows = {}
        for each in here:
            if each.lane not in self.busy:
                flows.setdefault((each.lane, each.tenant), []).append(each)
        firsts = [min(flow, key=partial(self.own_turn, index)) for flow in flows.values()]
        return min(firsts, key=partial(self.turn, index), default=None)

    def turn(self, index, each):
        shares = self.queue.queues[index].shares
        given = [(tokens, at_s) for _, tokens, at_s in self.given_to(index, each.tenant)]
        assert shares.tokens(each.tenant, self.now_s) == pytest.approx(self.weight(given))
        return (-each.strict_priority, shares.level(each.tenant), each.order, each.ticket)

    def own_turn(self, index, each):
        """The turn among the requests of its tenant: by what its id was given since the first."""
        level = self.queue.queues[index].within.level(each.tenant, each.fair_share_id)
        since = list(dropwhile(lambda row: not row[0], self.given_to(index, each.tenant)))
        own = [(tokens, at_s) for name, tokens, at_s in since if name == each.fair_share_id]
        assert 2.0 ** (level - self.now_s / HALF_LIFE_S) == pytest.approx(self.weight(own))
        return (-each.strict_priority, level, each.order, each.ticket)

    def given_to(self, index, tenant):
        return [row[2:] for row in self.given if row[:2] == (index, tenant)]

    def weight(self, given):
        return sum(tokens * 0.5 ** ((self.now_s - at_s) / HALF_LIFE_S) for tokens, at_s in given)

    def drop(self, ticket):
        index, _ = self.live.pop(ticket)
        if not any(at == index for at, _ in self.live.values()):
            self.naive.leave(index)

    @invariant()
    def holds(self):
        self.queue.check_invariants()
        assert len(self.queue) == len(self.live)
        assert self.queue.isl_tokens == sum(each.isl_tokens for _, each in self.live.values())
        assert [each.deficit_tokens for each in self.queue.queues] == self.naive.deficits


Consistent.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestConsistent = Consistent.TestCase


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


def test_the_request_that_crosses_a_limit_waits_and_the_next_is_refused():
    queue = queue_of(1, raw_isl_token_queue_limit_per_worker=100)
    queue.push(waiting(150), 0, 2, 0.0)
    queue.push(waiting(150), 0, 2, 0.0)
    with pytest.raises(QueueFullError) as caught:
        queue.push(waiting(1), 0, 2, 0.0)
    error = caught.value
    assert error.http_status == 529
    assert (error.policy_class, error.limit_kind) == ("c0", "isl_tokens")
    assert (error.current, error.limit) == (300, 200)
    queue.push(waiting(1), 0, 4, 0.0)
    queue.check_invariants()


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("request_queue_limit_per_worker", "requests"),
        ("request_queue_limit", "requests"),
        ("cached_token_queue_limit_per_worker", "cached_tokens"),
    ],
)
def test_each_limit_is_of_its_own(field, kind):
    queue = queue_of(1, 1, **{field: 1})
    queue.push(waiting(cached_tokens=5), 0, 1, 0.0)
    with pytest.raises(QueueFullError) as caught:
        queue.push(waiting(), 0, 1, 0.0)
    assert caught.value.limit_kind == kind
    queue.push(waiting(), 1, 1, 0.0)


def test_without_workers_a_limit_per_worker_is_zero():
    with pytest.raises(QueueFullError):
        queue_of(1, request_queue_limit_per_worker=5).push(waiting(), 0, 0, 0.0)


def test_a_tenant_below_its_share_takes_the_place_of_the_heaviest_ones_last():
    queue = queue_of(1, request_queue_limit=4)
    flood = [waiting(tenant="flood", order=float(i)) for i in range(4)]
    fill(queue, 0, *flood)
    with pytest.raises(QueueFullError):
        queue.push(waiting(tenant="flood"), 0, 1, 0.0)
    first, second = waiting(tenant="small"), waiting(tenant="small")
    ((displaced, error),) = queue.push(first, 0, 1, 0.0)
    assert displaced == flood[3]
    assert (error.http_status, error.tenant, error.current, error.share) == (429, "flood", 4, 4.0)
    ((displaced, _),) = queue.push(second, 0, 1, 0.0)
    assert displaced == flood[2]
    for tenant in ("small", "flood"):
        with pytest.raises(TenantQueueFullError) as caught:
            queue.push(waiting(tenant=tenant), 0, 1, 0.0)
        assert (caught.value.current, caught.value.share) == (2, 2.0)
    queue.check_invariants()
    assert len(queue) == 4


def test_a_fair_share_id_displaces_a_heavier_one_of_its_own_tenant_alone():
    queue = queue_of(1, request_queue_limit=6)
    flood = [waiting(tenant="a", fair_share_id="flood", order=float(i)) for i in range(3)]
    others = [waiting(tenant="b", order=float(i)) for i in range(3)]
    fill(queue, 0, *flood, *others)
    with pytest.raises(TenantQueueFullError):
        queue.push(waiting(tenant="a", fair_share_id="flood"), 0, 1, 0.0)
    ((displaced, error),) = queue.push(waiting(tenant="a", fair_share_id="new"), 0, 1, 0.0)
    assert (displaced, error.tenant) == (flood[2], "a")
    for own in ("new", "newer", "newest"):
        with pytest.raises(TenantQueueFullError):
            queue.push(waiting(tenant="a", fair_share_id=own), 0, 1, 0.0)
        if own == "new":
            ((displaced, _),) = queue.push(waiting(tenant="a", fair_share_id="third"), 0, 1, 0.0)
            assert displaced == flood[1]
    assert queue.queues[0].tenant_usage("b").requests == 3
    queue.check_invariants()


def test_alone_a_tenant_still_shares_its_queue_between_its_ids():
    queue = queue_of(1, request_queue_limit=3)
    fill(queue, 0, *(waiting(fair_share_id="flood") for _ in range(3)))
    with pytest.raises(QueueFullError):
        queue.push(waiting(fair_share_id="flood"), 0, 1, 0.0)
    assert len(queue.push(waiting(fair_share_id="small"), 0, 1, 0.0)) == 1
    with pytest.raises(QueueFullError):
        queue.push(waiting(fair_share_id="small"), 0, 1, 0.0)


def test_ids_of_a_tenant_take_turns_and_win_nothing_from_other_tenants():
    """Tenant `a` invents an id for each request; `b` has none. Both get the same."""
    queue = queue_of(1)
    fill(queue, 0, *(waiting(tenant="a", fair_share_id=f"id {i}") for i in range(20)))
    fill(queue, 0, *(waiting(tenant="b") for _ in range(20)))
    order = "".join(each.tenant for each in served(queue))
    assert all(abs(order[:n].count("a") - order[:n].count("b")) <= 1 for n in range(len(order)))
    fill(queue, 0, *(waiting(fair_share_id="many", order=float(i)) for i in range(6)))
    fill(queue, 0, *(waiting(fair_share_id="few", order=9.0) for _ in range(2)))
    taken = [each.fair_share_id for each in served(queue)]
    assert sorted(taken[:4]) == ["few", "few", "many", "many"]


def test_retry_after_is_the_expected_drain_time():
    queue = queue_of(1, request_queue_limit=10, max_wait_s=30.0)
    for step in range(1000):
        queue.charge(0, "a", "", 100, step * 0.1)
    fill(queue, 0, *(waiting(1000, tenant="a") for _ in range(10)))
    with pytest.raises(QueueFullError) as caught:
        queue.push(waiting(tenant="a"), 0, 1, 100.0)
    assert caught.value.retry_after_s == pytest.approx(10.0, rel=0.02)
    with pytest.raises(QueueFullError) as caught:
        queue.push(waiting(tenant="a"), 0, 1, 500.0)
    assert caught.value.retry_after_s == 30.0

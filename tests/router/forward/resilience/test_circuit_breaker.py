"""Ejected workers and the retry budget: exact, without clocks."""

from hypothesis import given
from hypothesis import strategies as st

from router.forward.resilience.circuit_breaker import BreakerLimits, CircuitBreaker
from router.forward.resilience.retry_budget import BudgetLimits, RetryBudget

LIMITS = BreakerLimits(failures=3, open_s=5.0, most_open_s=20.0)
URL = "http://e"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ok", "fail", "lives", "dead", "probe", "forget"]),
        st.integers(1, 4),
        st.floats(0, 30),
    )
)


def breaker(*worker_ids):
    made = CircuitBreaker(LIMITS)
    for worker_id in worker_ids:
        made.succeeded(worker_id, URL, 0.0)
    return made


def fail(made, worker_id, times, now_s=0.0):
    for _ in range(times):
        made.failed(worker_id, URL, now_s)


def test_consecutive_failures_open_the_breaker():
    made = breaker(1, 2)
    fail(made, 1, 2)
    made.succeeded(1, URL, 0.0)
    fail(made, 1, 2)
    assert (made.state(1), made.ejected()) == ("closed", [])
    fail(made, 1, 1)
    assert (made.state(1), made.ejected()) == ("open", [1])


def test_failed_trial_after_a_probe_doubles_the_open_time():
    made = breaker(1, 2)
    fail(made, 1, 3)
    for opened_s, long_s in ((0.0, 5.0), (5.0, 10.0), (15.0, 20.0), (35.0, 20.0)):
        ends_s = opened_s + long_s
        assert list(made.to_probe(ends_s - 0.1)) == []
        assert list(made.to_probe(ends_s)) == [(1, URL)]
        made.probed(1, ends_s, lives=True)
        assert (made.state(1), made.ejected()) == ("half_open", [])
        fail(made, 1, 1, ends_s)
        assert made.state(1) == "open"
    made.probed(1, 55.0, lives=True)
    made.succeeded(1, URL, 55.0)
    assert made.state(1) == "closed"
    fail(made, 1, 2, 55.0)
    assert made.state(1) == "closed"


def test_failed_probe_is_repeated_later():
    made = breaker(1, 2)
    fail(made, 1, 3)
    made.probed(1, 5.0, lives=False)
    assert made.state(1) == "open"
    assert list(made.to_probe(5.5)) == []
    assert list(made.to_probe(6.0)) == [(1, URL)]


def test_outlier_is_ejected_but_a_failing_fleet_is_not():
    """Failures that are not in a row."""
    made = breaker(1, 2, 3)
    for _ in range(20):
        fail(made, 1, 2)
        made.succeeded(1, URL, 0.0)
        for other in (2, 3):
            made.succeeded(other, URL, 0.0)
    assert made.ejected() == [1]
    troubled = breaker(1, 2, 3)
    for _ in range(20):
        for each in (1, 2, 3):
            fail(troubled, each, 2)
            troubled.succeeded(each, URL, 0.0)
    assert troubled.ejected() == []


def test_another_life_elsewhere_begins_anew():
    made = breaker(1, 2)
    fail(made, 1, 3)
    made.succeeded(1, "http://new", 1.0)
    assert made.state(1) == "closed"


def test_only_worker_is_never_ejected():
    made = breaker(1)
    fail(made, 1, 9)
    assert made.ejected() == []


@given(STEPS)
def test_at_most_half_of_the_workers_are_ejected(steps):
    made, now_s, seen = CircuitBreaker(LIMITS), 0.0, set()
    for step, worker_id, pause_s in steps:
        now_s += pause_s
        match step:
            case "ok":
                made.succeeded(worker_id, URL, now_s)
            case "fail":
                made.failed(worker_id, URL, now_s)
            case "lives" | "dead":
                made.probed(worker_id, now_s, lives=step == "lives")
            case "probe":
                assert all(made.state(each) == "open" for each, _ in made.to_probe(now_s))
            case "forget":
                made.forget(now_s)
        seen.add(worker_id)
        ejected = made.ejected()
        assert len(ejected) <= len(seen) / 2
        assert ejected == sorted(set(ejected))
        assert all(made.state(each) == "open" for each in ejected)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3))))
def test_retries_are_a_share_of_requests(steps):
    limits = BudgetLimits(share=0.25, least_per_s=1.0, most=4.0)
    budget, now_s, left = RetryBudget(limits, 0.0), 0.0, 4.0
    for is_request, pause_s in steps:
        now_s += pause_s
        left = min(4.0, left + pause_s + 0.25 * is_request)
        if is_request:
            budget.request(now_s)
        else:
            taken = budget.take(now_s)
            assert taken == (left >= 1) or abs(left - 1) < 1e-6
            left -= taken
        assert abs(budget.left - left) < 1e-6
        left = budget.left

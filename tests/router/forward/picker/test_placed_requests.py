"""Bookings of requests at gateways until their ends, with a clock that is moved by hand."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from router.client import Reservation
from router.forward.picker.answers import Route
from router.forward.picker.metrics import PickerMetrics
from router.forward.picker.placed_requests import FORGET_S, KEEP_S, PlacedRequests
from router.forward.picker.placement import Placed
from router.forward.picker.pool import PoolEndpoint
from router.forward.picker.stream import GatewayResponse
from router.forward.resilience.circuit_breaker import BreakerLimits, CircuitBreaker

ENDPOINT = PoolEndpoint("10.0.0.1:80", 1, None, "http://10.0.0.1:80")
DECISION = SimpleNamespace(isl_tokens=1, block_size=4, worker_id=1, dp_rank=0)


class Reports(list):
    """Reported steps, in place of a router."""

    def report(self, step):
        self.append(step.step.step)


class Placing:
    """Requests placed by hand, and what is reported of them."""

    def __init__(self, **options):
        self.now_s, self.reports = 0.0, Reports()
        breaker = CircuitBreaker(BreakerLimits(failures=3, open_s=1.0))
        metrics = PickerMetrics(CollectorRegistry())
        options = {"ends_by_log": False, **options}
        self.requests = PlacedRequests(None, breaker, metrics, lambda: self.now_s, **options)

    def place(self):
        booked = Reservation(None, self.reports, "id", None, DECISION, 100)
        self.requests.begin("id", Placed(Route("10.0.0.1:80"), ENDPOINT, booked))

    def sweep(self, after_s):
        self.now_s += after_s
        self.requests.sweep()


@pytest.mark.parametrize(("ttl_s", "keep_s"), [(300.0, KEEP_S), (9.0, 3.0), (float("inf"), KEEP_S)])
async def test_answer_under_way_is_reported_as_often_as_its_booking_needs(ttl_s, keep_s):
    placing = Placing(ttl_s=ttl_s)
    placing.place()
    placing.sweep(keep_s)
    assert placing.reports == []  # no answer has begun
    placing.requests.answered("id", GatewayResponse(200, "10.0.0.1:80"))
    placing.sweep(0.0)
    placing.sweep(keep_s / 2)
    placing.sweep(keep_s / 2)
    assert placing.reports == ["prefill_complete"] * 2
    assert placing.requests.sweep_s <= keep_s / 2
    placing.requests.leave("id")
    assert placing.reports[2:] == ["free"]
    assert placing.requests.count == 0


async def test_end_that_no_access_log_names_is_forgotten():
    placing = Placing(ends_by_log=True)
    placing.place()
    placing.requests.leave("id")
    placing.sweep(FORGET_S - 1)
    assert (placing.requests.count, placing.reports) == (1, [])
    placing.sweep(1)
    assert (placing.requests.count, placing.reports) == (0, ["free"])


async def test_all_bookings_are_freed_at_the_end():
    placing = Placing(ends_by_log=True)
    placing.place()
    placing.requests.end_all()
    placing.requests.leave("id")
    placing.requests.logged("id")
    assert (placing.requests.count, placing.reports) == (0, ["free"])

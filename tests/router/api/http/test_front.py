"""What every request goes through before a handler sees it."""

import asyncio
from statistics import median

import pytest
from road_calls import LIFE_CYCLE, profiled

from router.api.http.hot_routes import HotRoutes

PROMPT = list(range(40))


@pytest.fixture
async def fleet(router):
    await router.worker(1)
    return router


async def exchange(router, request):
    """The status of a raw request's answer, and all that comes until the server closes."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])
    finally:
        writer.close()


def find(method, path):
    """Routes are found without their commands being asked."""
    found = HotRoutes(None, None, lambda *_: None).find(method, path)
    return found and (found.path, found.id_in(path))


def test_hot_routes_are_found_by_method_and_path():
    booked = "/reservations/{request_id}"
    assert find("POST", "/select") == ("/select", "")
    assert find("POST", "/reservations") == ("/reservations", "")
    assert find("DELETE", "/reservations/a b") == (booked, "a b")
    assert find("POST", "/reservations/r/prefill_complete") == (f"{booked}/prefill_complete", "r")
    assert find("POST", "/reservations/r/output_block") == (f"{booked}/output_block", "r")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/select"),
        ("POST", "/select/"),
        ("POST", "/select\n"),
        ("POST", "/reservations/"),
        ("POST", "/reservations/r"),
        ("DELETE", "/reservations/"),
        ("DELETE", "/reservations/r/"),
        ("DELETE", "/reservations/r/prefill_complete"),
        ("POST", "/reservations//prefill_complete"),
        ("POST", "/reservations/a/b/prefill_complete"),
        ("POST", "/reservations/r/prefill_complete/"),
        ("POST", "/workers"),
    ],
)
def test_other_routes_are_not_hot(method, path):
    assert find(method, path) is None


async def test_an_announced_length_over_the_limit_is_refused_before_the_body_comes(router):
    head = b"POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    assert await exchange(router, head + b"content-length: 100000000\r\n\r\n") == 413


async def test_a_path_that_is_nearly_a_hot_one_is_not_found(router):
    answer = await router.post("/select%0A", {"token_ids": PROMPT})
    assert (answer.status_code, answer.json()["code"]) == (404, "route_not_found")


async def test_answers_are_counted_by_route_and_refusals_by_code(fleet):
    await fleet.post("/select", {"token_ids": PROMPT})
    await fleet.post("/reservations/x/prefill_complete", None)
    route = "/reservations/{request_id}/prefill_complete"
    line = 'kv_router_requests_total{code="%d",interface="http",route="%s"}'
    assert await fleet.metric(line % (200, "/select")) == 1
    assert await fleet.metric(line % (404, route)) == 1
    refused = 'kv_router_refusals_total{code="reservation_not_found",interface="http"}'
    assert await fleet.metric(refused) == 1


async def test_python_calls_of_a_life_cycle_stay_within_their_budget():
    walks = await profiled(LIFE_CYCLE, 16)
    for road in LIFE_CYCLE.roads:
        figures = [walk.figures() for walk in walks[road.name]]
        assert len(figures) == 16
        for name in ("calls", "of which HTTP"):
            found, most = median(each[name] for each in figures), road.goals[name]
            print(f"{road.name}: {found} {name}, at most {most}")  # noqa: T201 - with -s
            assert found <= most, f"{road.name}: {name}"

"""Probes of workers: when, and what is made of silence."""

from random import Random

from router.forward.resilience.circuit_breaker import BreakerLimits, CircuitBreaker
from router.forward.resilience.health_probe import ProbeTimes
from router.forward.resilience.worker_list import ListedWorker
from support.engines.tokenizing_engine import TokenizingEngine
from support.fleets.forwarding import RunningForward
from support.processes.running import RunningRouter
from support.processes.servers import eventually

URL = "http://e"


def test_probes_are_spread_over_the_interval():
    workers = {ListedWorker(n, "m", URL, 16) for n in range(200)}
    times, counts = ProbeTimes(10.0, Random(1)), dict.fromkeys(workers, 0)
    most = 0
    for step in range(2_000):
        due = times.due(workers, step * 0.5)
        most = max(most, len(due))
        for each in due:
            counts[each] += 1
    assert all(85 < count < 115 for count in counts.values())
    assert most < 60
    assert times.due({ListedWorker(1, "m", "http://new", 16)}, 2_000.0) == []


def test_repeated_silence_ejects_unless_a_probe_succeeds():
    breaker = CircuitBreaker(BreakerLimits(silent_probes=2, open_s=5.0))
    breaker.succeeded(2, URL, 0.0)
    for lives in (False, True, False):
        breaker.checked(1, URL, 0.0, lives=lives)
    assert breaker.ejected() == []
    breaker.succeeded(1, URL, 0.0)
    breaker.checked(1, URL, 0.0, lives=False)
    assert breaker.ejected() == []
    breaker.checked(1, URL, 0.0, lives=False)
    assert (breaker.state(1), breaker.ejected()) == ("open", [1])
    assert list(breaker.to_probe(5.0)) == [(1, URL)]
    breaker.probed(1, 5.0, lives=True)
    assert breaker.ejected() == []


async def test_silent_worker_is_ejected_before_a_request_fails(nats_server):
    well, ill = TokenizingEngine(None), TokenizingEngine(None)
    ill.is_well = False
    async with RunningRouter(nats_server.url).running() as router, well.running(), ill.running():
        await router.worker(1, endpoint=well.url)
        await router.worker(2, endpoint=ill.url)
        fields = {"probe_interval_s": 0.1, "breaker_open_s": 600.0}
        async with RunningForward(str(router.client.base_url), **fields).running() as forward:
            line = "kv_router_forward_ejected_workers"
            await eventually(lambda: is_one(forward, line))
            for number in range(8):
                answer = await forward.complete(prompt=[number, 2, 3])
                assert answer.headers["x-worker-id"] == "1"
                assert answer.headers["x-forward-attempts"] == "1"
            line = 'kv_router_forward_probes_total{outcome="silent",standing="closed"}'
            assert await forward.metric(line) == 3
            assert well.probed


async def is_one(forward, line):
    return await forward.metric(line) == 1

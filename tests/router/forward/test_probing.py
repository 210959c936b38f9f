"""Probes of workers: when, and what is made of silence."""

from random import Random

from forwarding import RunningForward
from router.forward.probing import ProbeTimes
from router.forward.roster import Worker
from router.forward.standing import Standing, StandingLimits
from running import RunningRouter
from servers import eventually
from tokenizing_engine import TokenizingEngine

URL = "http://e"


def test_each_is_due_in_its_own_time_and_about_as_often_as_asked():
    workers = {Worker(n, "m", URL, 16) for n in range(200)}
    times, counts = ProbeTimes(10.0, Random(1)), dict.fromkeys(workers, 0)
    most = 0
    for step in range(2_000):
        due = times.due(workers, step * 0.5)
        most = max(most, len(due))
        for each in due:
            counts[each] += 1
    assert all(85 < count < 115 for count in counts.values())
    assert most < 60
    assert times.due({Worker(1, "m", "http://new", 16)}, 2_000.0) == []


def test_silence_again_and_again_is_enough_and_an_answer_between_ends_it():
    standing = Standing(StandingLimits(silent_probes=2, open_s=5.0))
    standing.succeeded(2, URL, 0.0)
    for lives in (False, True, False):
        standing.checked(1, URL, 0.0, lives=lives)
    assert standing.ejected() == []
    standing.succeeded(1, URL, 0.0)
    standing.checked(1, URL, 0.0, lives=False)
    assert standing.ejected() == []
    standing.checked(1, URL, 0.0, lives=False)
    assert (standing.state(1), standing.ejected()) == ("open", [1])
    assert list(standing.to_probe(5.0)) == [(1, URL)]
    standing.probed(1, 5.0, lives=True)
    assert standing.ejected() == []


async def test_a_worker_that_falls_silent_is_left_alone_before_a_request_fails(nats_server):
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

"""The requests that prove event sockets, before real sockets."""

import os

from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.servers import eventually


async def worker_with(router, *clauses):
    """The worker, once its sentence has all these clauses."""

    async def find():
        for worker in (await router.client.get("/workers")).json():
            if all(clause in (worker["attachment"] or "") for clause in clauses):
                return worker
        return None

    return await eventually(find, timeout_s=30)


async def trust_of(router, dp_rank=0):
    (worker,) = (await router.client.get("/workers")).json()
    return worker["ranks"][dp_rank]["trust"]


async def has_trust(router, state, reason="", dp_rank=0):
    trust = await trust_of(router, dp_rank)
    return trust["state"] == state and reason in (trust["reason"] or "")


async def test_each_rank_is_proved_by_one_request():
    engine = OpenAiEngine(ranks=2)
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await worker_with(router, "2 ranks", "events with replay; proved by a request to each rank")
        assert engine.completions_served == 2
        assert await router.metric("kv_router_attached_proof_requests_total") == 2
        await eventually(lambda: has_trust(router, "exact"))


async def test_silent_rank_is_named_and_degraded():
    engine = OpenAiEngine(ranks=2, silent_ranks=[1])
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        worker = await worker_with(router, "rank 1: no event within 2 s of a request sent to it")
        assert "rank 0" not in worker["attachment"]
        await eventually(lambda: has_trust(router, "degraded", "rank 1: no event within 2 s"))


async def test_event_that_comes_late_is_a_proof():
    engine = OpenAiEngine(is_silent=True)
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await worker_with(router, "no event within 2 s")
        engine.release()
        await worker_with(router, "events with replay; proved by a request")
        assert engine.completions_served == 1


async def test_swapped_sockets_are_said():
    engine = OpenAiEngine(ranks=2)
    engine.ranks.reverse()
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        worker = await worker_with(router, "batches of rank 1 arrive where rank 0 is registered")
        assert worker["ranks"][0]["trust"]["state"] != "exact"


async def test_events_without_the_salt_are_a_proof_with_a_warning():
    engine = OpenAiEngine(knows_salt="unsaid")
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        await worker_with(router, "proved by a request", "do not contain the cache_salt")


async def test_no_request_is_sent_if_the_setting_says_so():
    engine = OpenAiEngine()
    fields = {"workers": engine.url, "prove_workers": False}
    async with engine.running(), DirectRouter(**fields).running() as router:
        worker = await worker_with(router, "events with replay")
        await router.until_exact(worker["worker_id"])
        assert engine.completions_served == 0
        assert "proved" not in worker["attachment"]


def own_host():
    """A loopback address of this process alone, where the customary ports are free."""
    high, low = divmod(os.getpid(), 250)
    return f"127.{1 + high % 250}.{low}.1"


async def test_guessed_socket_is_used_if_it_is_proved():
    port = 5556
    engine = OpenAiEngine(sources=None, version="0.24.0", events_port=port, host=own_host())
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        found = f"events found at tcp://{engine.host}:{port}, which it does not name; proved by"
        await worker_with(router, found)


async def test_guessed_socket_that_is_none_is_not_used():
    engine = OpenAiEngine(sources=None, version="0.24.0", host=own_host())
    async with engine.running(), DirectRouter(workers=engine.url).running() as router:
        hint = "(vLLM does from 0.31), and :5557 and :5556 are not proved; name them"
        worker = await worker_with(router, hint)
        assert worker["kv_events_endpoints"] == {}

"""Engines of a router in direct mode: a fault of one does not affect the others."""

import msgspec
import pytest

from router.discovery import worker_verdicts
from router.indexer.rank_index import FRESH_S
from router.ingest import engines
from router.publisher.feed.engine_feed import EngineFeed
from support.engines.zmq_engines import cleared
from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.processes.servers import equals, free_port

PROMPT = range(40)
PROOFS = 4
"""Replays of an idle engine that take longer together than a proof counts."""


def condition(view, dp_rank=0):
    return view["ranks"][dp_rank]["engine"]["condition"]


async def test_an_idle_engine_stays_exact(eventually):
    engine = DirectEngine(1)
    async with direct_router(engine) as router:
        for _ in range(2):  # what was proven before is out of date after each
            proofs = engine.ranks[0].replays
            await eventually(lambda most=proofs + PROOFS: engine.ranks[0].replays >= most)
            await router.until_exact(1)
            (rank,) = (await router.view(1))["ranks"]
            assert rank["trust"]["state"] != "exact" or rank["trust"]["age_s"] <= FRESH_S


async def test_an_engine_without_replay_is_not_called_exact(eventually):
    engine = DirectEngine(1, has_replay=False)
    with engine:
        async with DirectRouter().running() as router:
            await router.register(engine)

            async def is_blind():
                return condition(await router.view(1)) == "blind"

            await eventually(is_blind)
            await eventually(lambda: engine.ranks[0].is_heard)
            engine.cache(PROMPT)
            await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10}))

            async def trust():
                (rank,) = (await router.view(1))["ranks"]
                return rank["trust"]

            async def is_stale():
                return ((await trust())["age_s"] or 0.0) > FRESH_S

            await eventually(is_stale)
            assert (await trust())["state"] in ("lagging", "degraded")


async def test_unreachable_engine_does_not_affect_others(eventually):
    there = DirectEngine(1)
    async with direct_router(there) as router:
        port = free_port()
        fields = {"kv_events_endpoint": f"tcp://127.0.0.1:{port}"}
        body = {"worker_id": 2, "endpoint": "http://w2", "block_size": 4, **fields}
        assert (await router.post("/workers", body)).json()["lifecycle"] == "schedulable"

        async def is_said():
            (rank,) = (await router.view(2))["ranks"]
            assert (rank["trust"]["state"], rank["engine"]["condition"]) == ("blind", "connecting")
            return str(port) in (rank["engine"]["problem"] or "")

        await eventually(is_said)
        await router.until_exact(1)
        there.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10, (2, 0): 0}))


async def test_a_restarted_engine_leaves_no_ghosts(eventually):
    engine, other = DirectEngine(1), DirectEngine(2)
    async with direct_router(engine, other) as router:
        engine.cache(PROMPT)
        other.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10, (2, 0): 10}))
        engine.ranks[0].restart()
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 0, (2, 0): 10}))
        await router.until_exact(1)
        engine.cache(PROMPT[:8])
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 2, (2, 0): 10}))


async def test_gone_engine_receives_no_requests(eventually, monkeypatch):
    monkeypatch.setattr(worker_verdicts, "GONE_S", 0.5)
    engine, other = DirectEngine(1), DirectEngine(2)
    async with direct_router(engine, other) as router:
        engine.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10, (2, 0): 0}))

        async def lifecycle():
            return (await router.view(1))["lifecycle"]

        async def chosen():
            answer = await router.post("/select", {"token_ids": list(PROMPT)})
            return answer.json()["worker_id"]

        assert await chosen() == 1
        engine.ranks[0].stop()
        await eventually(lambda: equals(lifecycle(), "unschedulable"))
        assert (await router.view(1))["not_schedulable_reasons"] == [
            "its engines could not be reached for 0.5 s"
        ]
        assert await chosen() == 2
        engine.ranks[0].start()
        await eventually(lambda: equals(lifecycle(), "schedulable"))
        engine.cache(PROMPT)
        await eventually(lambda: equals(chosen(), 1))


async def test_nonsense_costs_only_its_engine(eventually):
    engine, other = DirectEngine(1), DirectEngine(2)
    async with direct_router(engine, other) as router:
        engine.ranks[0].publish_payload(b"\xc1 not msgpack")
        engine.ranks[0].publish_payload(msgspec.msgpack.encode({"another": "format"}))
        engine.ranks[0].publish({"type": "BlockStored", "block_hashes": "?"})
        engine.cache(PROMPT)
        other.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10, (2, 0): 10}))
        (rank,) = (await router.view(1))["ranks"]
        assert rank["trust"]["state"] == "degraded"
        assert rank["engine"]["problem"]
        await router.until_exact(2)


@pytest.mark.parametrize(("engine_kind", "left"), [("sglang", 0), ("vllm", 10)])
async def test_sglang_clears_every_tier(eventually, engine_kind, left):
    engine = DirectEngine(1)
    with engine:
        async with DirectRouter().running() as router:

            async def host_blocks():
                answer = await router.post("/overlap_scores", {"token_ids": list(PROMPT)})
                return answer.json()["workers"][0]["host_pinned_blocks"]

            await router.post("/workers", engine.body(engine=engine_kind))
            engine.ranks[0].publish({**engine.event(PROMPT), "medium": "CPU"})
            await eventually(lambda: equals(host_blocks(), 10))
            engine.ranks[0].publish(cleared())
            engine.cache(range(100, 104))
            await eventually(lambda: equals(router.overlaps(range(100, 104)), {(1, 0): 1}))
            assert await host_blocks() == left


async def test_sglang_with_a_hybrid_model_has_an_upper_bound(eventually):
    engine = DirectEngine(1)
    with engine:
        async with DirectRouter().running() as router:
            await router.post("/workers", engine.body(engine="sglang", hybrid={}))
            engine.cache(PROMPT)
            await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10}))
            (rank,) = (await router.view(1))["ranks"]
            assert "hybrid model: overlap is an upper bound" in rank["trust"]["reason"]


async def test_a_long_history_goes_in_by_slices_and_is_whole(eventually):
    engine = DirectEngine(1)
    with engine:
        for i in range(300):
            engine.cache(range(1000 * i, 1000 * i + 256))
        async with DirectRouter().running() as router:
            await router.register(engine)
            await router.until_exact(1)
            assert (await router.view(1))["ranks"][0]["held_blocks"] == 300 * 64
            assert await router.overlaps(range(5000, 5256)) == {(1, 0): 64}


@pytest.fixture
def _soon(monkeypatch):
    monkeypatch.setattr(engines, "RENEW_S", 0.1)


@pytest.mark.usefixtures("_soon")
async def test_failed_follower_restarts_without_affecting_others(
    eventually, monkeypatch, caplog, tmp_path
):
    engine, other = DirectEngine(1), DirectEngine(2)
    slices, failed = EngineFeed.slices, []

    def fail_once(feed, steps, clock):
        if steps and not failed:
            failed.append(feed)
            raise RuntimeError("a defect")
        return slices(feed, steps, clock)

    async with direct_router(engine, other, data_dir=str(tmp_path)) as router:
        monkeypatch.setattr(EngineFeed, "slices", fail_once)
        engine.cache(PROMPT)
        other.cache(PROMPT)
        await eventually(lambda: equals(router.overlaps(PROMPT), {(1, 0): 10, (2, 0): 10}))
        assert await router.metric("kv_router_follower_failures_total") == 1
        assert failed
        await router.until_exact(1, 2)
        assert "a defect" in caplog.text


async def test_followers_are_measured():
    async with direct_router(DirectEngine(1)) as router:
        line = 'kv_engine_connections_total{dp_rank="0",worker_id="1"}'
        assert await router.metric(line) == 1

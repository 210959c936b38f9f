"""Instances and peers of an index alone: announced, registered, refused."""

import pytest

from router.protocol.values import Tier
from support.fleets.direct import DirectEngine
from support.processes.running import SUBJECTS, FakeWorker
from support.processes.servers import equals, eventually, free_port
from support.values.builders import rank
from support.values.indexing import (
    PROMPT,
    Engine,
    RunningIndex,
    announced,
    publishing,
    sequence_hashes,
)


async def until_a_silent_worker_is_gone(index, bus):
    """Wait for as long as a worker may be silent: until one that reports nothing is removed."""
    silent = FakeWorker(bus, 99)
    await silent.announce()
    await silent.deliver()
    line = 'kv_router_workers_gone_total{reason="silent"}'
    await eventually(lambda: equals(index.metric(line), 1))


async def test_a_registered_rank_is_pending_until_it_is_read(index, bus, eventually):
    await index.register(1, endpoint="nats://somewhere:4222")
    view = await index.instance(1)
    assert view["status"] == "pending"
    assert view["endpoints"] == {"0": "nats://somewhere:4222"}
    assert view["listeners"]["0"]["reason"] == "no checkpoint read yet"
    await until_a_silent_worker_is_gone(index, bus)
    assert (await index.status(1)) == "pending"
    async with publishing(Engine(bus, 1)):
        await eventually(lambda: equals(index.status(1), "active"))
    assert "reason" not in (await index.instance(1))["listeners"]["0"]


async def test_events_before_the_registration_are_asked_for_again(index, bus, eventually):
    engine = Engine(bus, 1)
    engine.cache(PROMPT)
    async with publishing(engine):
        line = 'kv_router_log_messages_total{outcome="unannounced"}'
        await eventually(lambda: equals(index.metric(line), 1))
        await index.register(1)
        await eventually(lambda: equals(index.scores(PROMPT), {"1": {"0": 160}}))


async def test_a_registered_rank_outlives_silence(served, bus):
    await until_a_silent_worker_is_gone(served, bus)
    assert await served.status(1) == "active"
    assert await served.metric('kv_router_worker_trust{dp_rank="0",state="lagging",worker_id="1"}')


async def test_ranks_need_not_be_in_a_row(served, bus, eventually):
    engine = Engine(bus, 1, 9)
    engine.cache(PROMPT[:16])
    await served.register(1, dp_rank=9)
    async with publishing(engine):
        await eventually(lambda: equals(served.scores(PROMPT), {"1": {"0": 160, "9": 16}}))
    body = {"instance_id": 1, "model_name": "m"}
    assert (await served.post("/unregister", {**body, "dp_rank": 5})).status_code == 404
    assert (await served.post("/unregister", {**body, "dp_rank": 0})).status_code == 200
    assert await served.scores(PROMPT) == {"1": {"9": 16}}
    assert list((await served.instance(1))["listeners"]) == ["9"]
    assert (await served.post("/unregister", {**body, "dp_rank": 9})).status_code == 200
    assert await served.instance(1) is None
    assert (await served.query(PROMPT))["code"] == "no_indexer"


async def test_an_announced_worker_appears_by_itself(index, bus, eventually):
    async with announced(bus, 5, model_name="m") as worker:
        journal = worker.journals[rank(5)]
        journal.stored(Tier.DEVICE, sequence_hashes(PROMPT, 4), None)
        await worker.deliver()
        await eventually(lambda: equals(index.scores(PROMPT), {"5": {"0": 160}}))
        assert await index.instance(5) == {
            "instance_id": 5, "source": "nats", "status": "active", "model_name": "m",
            "routing_group": "default", "block_size": 4, "endpoints": {"0": "nats"},
            "listeners": {"0": {"endpoint": "nats", "status": "active"}},
        }  # fmt: skip
        answer = await index.register(5, block_size=4)
        assert answer.json()["error"] == "instance 5 dp_rank 0 already registered"
        for answer in (
            await index.register(5, block_size=4, dp_rank=1),
            await index.post("/unregister", {"instance_id": 5, "model_name": "m"}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (409, "instance_announced")
        answer = await index.register(6)
        assert answer.json()["error"] == (
            "block_size mismatch for model=m routing_group=default: existing=4, requested=16"
        )


async def test_a_broken_rank_is_degraded_with_a_reason(index, bus, eventually):
    async with announced(bus, 5, model_name="m") as worker:
        await eventually(lambda: equals(index.status(5), "active"))
        journal = worker.journals[rank(5)]
        journal.stored(Tier.DEVICE, [1], None)
        journal.take()
        journal.stored(Tier.DEVICE, [2], 1)
        await worker.deliver()
        await eventually(lambda: equals(index.status(5), "degraded"))
        assert (await index.instance(5))["listeners"]["0"]["reason"] == "events missing"


async def test_an_announcement_takes_the_place_of_a_registration(served, bus, eventually):
    async with announced(bus, 1, model_name="m2"):

        async def model():
            return (await served.instance(1))["model_name"]

        await eventually(lambda: equals(model(), "m2"))
        assert (await served.query(PROMPT))["code"] == "no_indexer"


async def test_an_old_withdrawal_does_not_touch_a_registration(nats_server, bus, eventually):
    await bus.js.create_key_value(bucket=SUBJECTS.bucket, history=1, direct=True)
    await bus.js.publish(SUBJECTS.key("worker.1"), b"", headers={"KV-Operation": "DEL"})
    async with RunningIndex(nats_server.url).running() as index:
        await index.register(1)
        line = 'kv_router_announcements_total{outcome="withdrawn"}'
        await eventually(lambda: equals(index.metric(line), 1))
        assert await index.instance(1)


async def test_an_instance_has_one_scope(index):
    await index.register(1)
    answer = await index.register(1, dp_rank=1, routing_group="g")
    assert (answer.status_code, answer.json()["code"]) == (409, "other_scope")


async def test_registrations_are_bounded(nats_server):
    async with RunningIndex(nats_server.url, max_registered_ranks=2).running() as index:
        statuses = [(await index.register(i)).status_code for i in (1, 2, 3)]
    assert statuses == [201, 201, 503]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"replay_endpoint": "tcp://127.0.0.1:5558"}, "replay_endpoint"),
        ({"additional_salt": "s"}, "additional_salt"),
    ],
)
async def test_unsupported_operation_is_501(index, fields, field):
    answer = await index.register(1, **fields)
    said = answer.json()
    assert (answer.status_code, said["field"]) == (501, field)
    assert said["reason"]
    assert said["allowed"]
    assert await index.instance(1) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"endpoint": "natsx"}, "kv_events_endpoints.0"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "kv_events_endpoints.0"),
        ({"endpoint": "tcp://8.8.8.8:1"}, "kv_events_endpoints.0"),
        ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "x"}, "replay_endpoints.0"),
    ],
)
async def test_sockets_that_will_not_do_are_refused(index, fields, field):
    answer = await index.register(1, **fields)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert await index.instance(1) is None


# ── Engines' own sockets ─────────────────────────────────────────────────────────────────────────


async def test_engines_are_read_without_a_bus(eventually):
    one, two = DirectEngine(1, ranks=2, block_size=16), DirectEngine(2, block_size=16)
    async with RunningIndex("").running() as index:
        await eventually(index.is_ready)
        with one, two:
            one.cache(PROMPT, dp_rank=1)
            for dp_rank in (0, 1):
                sockets = {"endpoint": one.endpoint(dp_rank)}
                sockets["replay_endpoint"] = one.replay_endpoint(dp_rank)
                assert (await index.register(1, dp_rank=dp_rank, **sockets)).status_code == 201
            await index.register(2, endpoint=two.endpoint(0))
            await eventually(lambda: equals(index.status(1), "active"))
            # A lagging rank is active, too: its replayed batches are applied after that.
            await eventually(lambda: equals(index.scores(PROMPT), {"1": {"1": 160}}))
            view = await index.instance(1)
            assert (view["source"], view["endpoints"]["1"]) == ("zmq", one.endpoint(1))
            two.cache(PROMPT[:32])
            both = {"1": {"1": 160}, "2": {"0": 32}}
            await eventually(lambda: equals(index.scores(PROMPT), both))
            body = {"instance_id": 1, "model_name": "m"}
            assert (await index.post("/unregister", {**body, "dp_rank": 1})).status_code == 200
            assert await index.scores(PROMPT) == {"2": {"0": 32}}
            assert list((await index.instance(1))["listeners"]) == ["0"]


async def test_an_engine_that_is_not_there_is_pending_with_a_reason():
    async with RunningIndex("").running() as index:
        await index.register(1, endpoint=f"tcp://127.0.0.1:{free_port()}")
        listener = (await index.instance(1))["listeners"]["0"]
        assert listener["status"] == "pending"
        assert listener["reason"].startswith("connecting")


async def test_without_a_bus_nothing_is_read_from_it():
    async with RunningIndex("").running() as index:
        answer = await index.register(1)
        assert (answer.status_code, answer.json()["field"]) == (501, "endpoint")


# ── Peers ────────────────────────────────────────────────────────────────────────────────────────


async def test_peers_are_a_bounded_list(nats_server):
    settings = {"max_peers": 2, "peers": "http://a:1"}
    async with RunningIndex(nats_server.url, **settings).running() as index:
        urls = ("http://a:1", "https://b", "http://c:3")
        answers = [await index.post("/register_peer", {"url": url}) for url in urls]
        assert [answer.status_code for answer in answers] == [201, 201, 503]
        assert (await index.client.get("/peers")).json() == ["http://a:1", "https://b"]
        answer = await index.post("/deregister_peer", {"url": "http://c:3"})
        assert (answer.status_code, answer.json()["error"]) == (404, "peer http://c:3 not found")


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://[::1", "http://a:x", "a:1"])
async def test_a_peer_has_a_url(index, url):
    answer = await index.post("/register_peer", {"url": url})
    assert (answer.status_code, answer.json()["field"]) == (422, "url")
    assert (await index.client.get("/peers")).json() == []

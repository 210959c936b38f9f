"""The router process against the faults of its world, with a real server."""

import asyncio
import socket
import time

import httpx
import pytest

from router.config.router import RouterConfig
from router.errors import ConfigError
from router.protocol.catalogue import encode_entry
from router.protocol.events import encode_log_message
from router.protocol.requests import SelectRequest
from router.protocol.subjects import Subjects
from router.protocol.values import SCHEME, Identity, Tier
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.journal.journal import EventJournal
from router.runtime.process.settings import configured
from router.scheduler.settings import DEFAULT_POLICY
from router.sequence.active.prompt import prepare
from router.service.router import RouterService
from support.processes.running import RunningRouter
from support.processes.servers import equals, eventually, free_port
from support.values.builders import announcement, rank

PROMPT = list(range(40))
SUBJECTS = Subjects("test")
SILENCE_S = 2.5


@pytest.fixture
async def impatient(nats_server):
    """A router as users have it: the default policy, and silent workers are soon given up."""
    as_it_ships = {"worker_silence_s": SILENCE_S, "policy": DEFAULT_POLICY}
    async with RunningRouter(nats_server.url, **as_it_ships).running() as router:
        yield router


async def ready(router):
    answer = await router.client.get("/ready?verbose")
    return answer.status_code, answer.json()


async def overlaps(router):
    answer = await router.post("/overlap_scores", {"token_ids": PROMPT})
    return {w["worker_id"]: w["device_blocks"] for w in answer.json().get("workers", ())}


async def cache(worker, tokens=40, to=None):
    """Let a fake worker's rank hold a prompt, and say so."""
    holder = to or rank(worker.announcement.worker_id)
    prompt = prepare(SelectRequest(token_ids=PROMPT[:tokens]), ())
    hashes = prompt.hashed(worker.announcement.identity).sequence_hashes.tolist()
    worker.journals[holder].stored(Tier.DEVICE, hashes, None)
    await worker.deliver(holder)


async def test_is_not_ready_without_schedulable_workers(router, eventually):
    async def waits_for_workers():
        status, body = await ready(router)
        return (status, body["reason"]) == (503, "no schedulable workers")

    await eventually(waits_for_workers)
    await router.worker(1)
    await eventually(lambda: equals(_status(router), 200))


async def test_missing_bus_is_awaited_and_reported(stopped_nats_server, eventually):
    server = stopped_nats_server
    async with RunningRouter(server.url).running() as router:
        status, body = await ready(router)
        assert status == 503
        assert f"not connected to NATS at {server.url}" in body["reason"]
        assert (await router.client.get("/health")).status_code == 200
        server.start()
        await router.worker(1)
        await eventually(lambda: equals(_status(router), 200))


async def test_without_the_bus_the_last_state_is_used(impatient, nats_server, eventually):
    worker = await impatient.worker(1)
    await cache(worker)
    await eventually(lambda: equals(overlaps(impatient), {1: 10}))
    nats_server.kill()

    async def degraded():
        return (await ready(impatient))[1]["degraded"]

    async def silence_s():
        (row,) = (await impatient.view(1))["ranks"]
        return row["trust"]["age_s"]

    await eventually(degraded)
    await eventually(lambda: is_above(silence_s(), SILENCE_S + 0.5))
    status, body = await ready(impatient)
    assert (status, "not connected" in body["degraded"]) == (200, True)
    answer = await impatient.post("/select_and_reserve", {"token_ids": PROMPT, "request_id": "x"})
    assert (answer.status_code, answer.json()["overlap_blocks"]) == (200, 10)
    assert answer.json()["trust"]["state"] == "lagging"
    order = await impatient.client.patch("/workers/1", json={"lifecycle": "cordoned"})
    assert (order.status_code, order.json()["code"]) == (503, "bus_unavailable")
    nats_server.start()
    await eventually(lambda: equals(degraded(), None))
    worker.journals[rank(1)].cleared()
    await worker.deliver()
    await eventually(lambda: equals(overlaps(impatient), {1: 0}))


async def test_a_lost_store_is_healed_by_checkpoints(router, nats_server, eventually):
    worker = await router.worker(1)
    await cache(worker)
    await eventually(lambda: equals(overlaps(router), {1: 10}))
    nats_server.kill()
    nats_server.start(empty=True)
    asked = await _next(worker.bus, SUBJECTS.checkpoint_wanted(rank(1)))
    assert asked
    view = await router.view(1)
    assert view["ranks"][0]["trust"]["state"] == "degraded"
    await worker.announce()
    worker.journals[rank(1)].require_checkpoint()
    await worker.deliver()
    await eventually(lambda: router.trusts(1))
    assert await overlaps(router) == {1: 10}


async def test_a_checkpoint_larger_than_a_message_comes_in_parts(router, eventually):
    worker = await router.worker(1)
    journal = worker.journals[rank(1)]
    journal.stored(Tier.DEVICE, range(200_000), None)
    events = KvEventPublisher(journal, SUBJECTS.events(rank(1)), flush_interval_s=0.02)

    async def ours():
        """Verify nothing: no other process has the id."""

    await events.flush(worker.transport, ours)
    stream = await worker.bus.js.stream_info(SUBJECTS.event_stream)
    assert stream.state.messages == 3

    async def held():
        return (await router.view(1))["ranks"][0]["held_blocks"]

    await eventually(lambda: equals(held(), 200_000))
    assert await router.trusts(1)


async def test_a_late_router_reads_from_the_last_checkpoints(router, nats_server, eventually):
    workers = await router.workers(1, 2)
    for worker in workers:
        await cache(worker, 8)
        await cache(worker)
    async with RunningRouter(nats_server.url, name="late").running() as late:
        await eventually(lambda: equals(overlaps(late), {1: 10, 2: 10}))
        await eventually(lambda: late.trusts(1))
        await eventually(lambda: equals(_status(late), 200))

        async def routers():
            return {r["name"] for r in (await late.client.get("/routers")).json()}

        await eventually(lambda: equals(routers(), {"r", "late"}))


async def test_orders_reach_every_router_and_outlive_them(router, nats_server, eventually):
    await router.worker(1)
    await router.client.patch("/workers/1", json={"lifecycle": "cordoned"})
    async with RunningRouter(nats_server.url, name="late").running() as late:

        async def lifecycle():
            view = await late.view(1)
            return view and view["lifecycle"]

        await eventually(lambda: equals(lifecycle(), "cordoned"))
        await late.client.patch("/workers/1", json={"lifecycle": "schedulable"})

    async def seen():
        return (await router.view(1))["lifecycle"]

    await eventually(lambda: equals(seen(), "schedulable"))


async def test_silent_worker_is_removed(impatient, eventually):
    workers = await impatient.workers(1, 2, 3)
    workers[0].is_reporting = False
    await eventually(lambda: equals(impatient.view(1), None))
    assert await impatient.metric('kv_router_workers_gone_total{reason="silent"}') == 1
    assert sorted(await overlaps(impatient)) == [2, 3]


async def test_silent_worker_that_reports_again_returns(impatient, eventually):
    workers = await impatient.workers(1, 2, 3)
    await cache(workers[0])
    workers[0].is_reporting = False
    await eventually(lambda: equals(impatient.view(1), None))
    workers[0].is_reporting = True
    await eventually(lambda: impatient.view(1))
    await _next(workers[0].bus, SUBJECTS.checkpoint_wanted(rank(1)))
    workers[0].journals[rank(1)].require_checkpoint()
    await workers[0].deliver()
    await eventually(lambda: impatient.trusts(1))
    assert (await overlaps(impatient))[1] == 10


async def test_paused_router_removes_no_worker_for_silence(nats_server, monkeypatch):
    monkeypatch.setattr("router.service.host.HEARD_S", 60.0)  # the bus may be late as well
    async with RunningRouter(nats_server.url, worker_silence_s=1.5).running() as router:
        await router.worker(1)
        time.sleep(1.7)  # noqa: ASYNC251 - nothing of this process runs
        heard = 'kv_router_load_reports_total{outcome="applied"}'
        before = await router.metric(heard)
        await eventually(lambda: is_above(router.metric(heard), before))
        assert await router.metric('kv_router_workers_gone_total{reason="silent"}') is None


async def is_above(answer, least):
    return await answer > least


async def test_a_withdrawn_worker_is_out_at_once(router, eventually):
    worker = await router.worker(1)
    announcer = await worker.announce()
    await announcer.withdraw()
    await eventually(lambda: equals(router.view(1), None))


async def test_garbage_on_the_event_stream_is_counted_and_ignored(router, eventually):
    worker = await router.worker(1)
    other = await router.worker(2)
    await cache(other)
    js = worker.bus.js
    for payload in (b"", b"garbage", b"\xff" * 50):
        await js.publish(SUBJECTS.events(rank(1)), payload)
        await js.publish("kv.test.events.x.y", payload)
        await worker.bus.client.publish(SUBJECTS.load(rank(1)), payload)
    line = 'kv_router_log_messages_total{outcome="unreadable"}'
    await eventually(lambda: equals(router.metric(line), 6))
    await cache(worker)
    await eventually(lambda: equals(overlaps(router), {1: 10, 2: 10}))
    assert await router.metric('kv_router_load_reports_total{outcome="unreadable"}') == 3


async def test_message_of_another_rank_is_refused(router, eventually):
    worker = await router.worker(1)
    await router.worker(2)
    worker.journals[rank(1)].require_checkpoint()
    (checkpoint,) = worker.journals[rank(1)].take()
    await worker.bus.js.publish(SUBJECTS.events(rank(2)), encode_log_message(checkpoint))
    line = 'kv_router_log_messages_total{outcome="unreadable"}'
    await eventually(lambda: equals(router.metric(line), 1))


@pytest.mark.parametrize(
    "entry",
    [
        ("worker.7", b"garbage"),
        ("worker.7", encode_entry(announcement(8))),
        ("worker.x", b"{}"),
        ("alien.7", b"{}"),
        ("order.7", b'{"lifecycle":"dead"}'),
    ],
)
async def test_garbage_in_the_registry_is_counted_and_ignored(router, eventually, entry):
    worker = await router.worker(1)
    key, payload = entry
    await worker.bus.js.publish(f"$KV.{SUBJECTS.bucket}.{key}", payload)
    line = 'kv_router_announcements_total{outcome="unreadable"}'
    await eventually(lambda: equals(router.metric(line), 1))
    assert (await router.client.get("/workers")).json()[0]["worker_id"] == 1


async def test_a_worker_with_another_hash_scheme_is_blind_and_loud(router, eventually):
    await router.worker(1)
    fields = {"identity": Identity("sha256-cbor", 4)}
    joining = asyncio.create_task(router.worker(2, **fields))
    line = 'kv_router_log_messages_total{outcome="foreign"}'
    await eventually(lambda: equals(router.metric(line), 1))
    trust = (await router.view(2))["ranks"][0]["trust"]
    assert trust["state"] == "blind"
    assert "sha256-cbor" in trust["reason"]
    joining.cancel()
    await asyncio.wait([joining])


async def test_different_block_sizes_degrade_trust_with_a_reason(router, eventually):
    """The announcement says 4, the events say 8."""
    worker = await router.worker(1)
    worker.journals[rank(1)] = EventJournal(rank(1), 1, Identity(SCHEME, 8))
    await worker.deliver()

    async def reason():
        return (await router.view(1))["ranks"][0]["trust"]["reason"]

    await eventually(lambda: equals(reason(), "events of another identity than announced"))


async def test_a_port_that_is_taken_is_a_clear_error():
    port = free_port()
    config = configured(RouterConfig, http_port=port, nats_url="nats://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=str(port)):
        await RouterService(config).run(asyncio.Event())


async def test_drains_before_it_closes(nats_server, eventually):
    router = RunningRouter(nats_server.url, drain_s=3.0)
    stop = asyncio.Event()
    running = asyncio.create_task(router.service.run(stop))
    await eventually(router.is_up)
    stop.set()

    async def draining():
        return "draining" in ((await ready(router))[1]["reason"] or "")

    await eventually(draining)
    assert (await router.client.get("/health")).status_code == 200
    await running
    with pytest.raises(httpx.ConnectError):
        await router.client.get("/health")
    await router.client.aclose()


async def _status(router):
    return (await ready(router))[0]


async def _next(bus, subject):
    subscription = await bus.client.subscribe(subject)
    return await subscription.next_msg(timeout=60)

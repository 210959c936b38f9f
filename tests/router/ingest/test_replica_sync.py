"""Real routers on one bus: what one books weighs at the others, come what may."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from router.protocol.replicas import (
    Frame,
    HandedOver,
    ProgressTold,
    ReservationFreed,
    decode_replica_message,
    encode_replica_message,
)
from support.processes.proxies import NONE, Faults, Proxy
from support.processes.running import SUBJECTS, RunningRouter
from support.processes.servers import eventually

PROMPT = list(range(40))


class Routers:
    """Routers on one bus, and a worker that all know."""

    def __init__(self, nats_url):
        self._nats_url = nats_url
        self._stack = AsyncExitStack()
        self.routers = []

    async def __aenter__(self):
        first = await self.start("r1")
        self.worker = await first.worker(1)
        await self.start("r2")
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def start(self, name, **fields):
        router = RunningRouter(self._nats_url, name=name, **fields)
        await self._stack.enter_async_context(router.running())
        if self.routers:
            await eventually(lambda: router.trusts(1))
            await eventually(router.is_ready)
        self.routers.append(router)
        return router


@pytest.fixture
async def routers(nats_server):
    async with Routers(nats_server.url) as routers:
        yield routers


async def load(router):
    (view,) = (await router.client.get("/loads")).json()[0]["loads"]
    return view["potential_prefill_tokens"], view["potential_decode_blocks"]


async def book(router, request_id, tokens=PROMPT):
    body = {"token_ids": tokens, "request_id": request_id}
    answer = await router.post("/select_and_reserve", body)
    assert answer.status_code == 200, answer.text


async def count(router, name):
    return await router.metric(f"kv_router_replica_{name}")


async def until_loaded(router, expected):
    async def is_loaded():
        return await load(router) == expected

    await eventually(is_loaded)


async def test_bookings_of_one_router_count_at_the_other(routers):
    first, second = routers.routers
    await book(first, "a")
    await until_loaded(second, (40, 10))
    await second.post("/reservations/a/prefill_complete", {})
    await until_loaded(first, (0, 10))
    await until_loaded(second, (0, 10))
    await second.client.delete("/reservations/a")
    await until_loaded(first, (0, 0))
    await until_loaded(second, (0, 0))
    assert await count(first, "known") == 1
    assert await count(second, "frames_applied_total") == 3
    assert await count(second, "catch_ups_total") == 0


async def test_many_bookings_travel_in_few_frames(routers):
    first, second = routers.routers
    await until_loaded(first, (0, 0))
    before = await count(first, "frames_sent_total")
    started_s = time.monotonic()
    await asyncio.gather(*(book(first, str(i)) for i in range(150)))
    await until_loaded(second, (150 * 40, 10))
    frames = await count(first, "frames_sent_total") - before
    assert frames <= (time.monotonic() - started_s) / 0.005 + 2
    assert await count(second, "reservations") == 150
    assert await count(first, "reservations") == 0


async def test_late_router_knows_all_bookings_once_ready(routers):
    first, second = routers.routers
    await book(first, "a")
    await book(second, "b", [*PROMPT[:20], 99])
    third = await routers.start("r3")
    assert await load(third) == (40 + 21, 10 + 1)
    assert await count(third, "catch_ups_total") == 2
    assert await count(first, "snapshots_sent_total") == 1


async def test_lost_frames_are_caught_up_with(routers, nats_server):
    _, second = routers.routers
    async with (
        Proxy(nats_server.port) as link,
        RunningRouter(link.url, name="r3").running() as third,
    ):
        await eventually(third.is_ready)
        await eventually(lambda: third.trusts(1))
        before = await count(second, "catch_ups_total")
        link.from_client = Faults(lost=1.0, about=b".sequences.")
        await book(third, "a")
        await eventually(lambda: link.counts["lost"] >= 2)  # a heartbeat may have come first
        link.from_client = NONE
        await until_loaded(second, (40, 10))
        assert await count(second, "catch_ups_total") == before + 1
        assert await count(second, "in_doubt") == 0


async def count_is(router, name, expected):
    return await count(router, name) == expected


async def test_bookings_of_a_dead_router_are_forgotten(routers):
    first, second = routers.routers
    third = RunningRouter(first.config.bus.nats_url, name="r3")
    async with third.running():
        await eventually(third.is_ready)
        await book(third, "a")
        await until_loaded(first, (40, 10))
        await until_loaded(second, (40, 10))
        third.kill()
    await book(first, "b")
    await until_loaded(second, (80, 10))
    await until_loaded(second, (40, 10))
    assert await count(second, "gone_total") == 1
    assert await count(second, "known") == 1


async def test_a_router_that_stops_leaves_its_requests_to_another(nats_server, monkeypatch):
    """What it had booked weighs on, and can be completed and freed, after it is gone."""
    monkeypatch.setattr("router.ingest.replica_sync.GIVE_S", 60.0)
    leaving = RunningRouter(nats_server.url, name="leaving")
    staying = RunningRouter(nats_server.url, name="staying")
    async with staying.running():
        await staying.worker(1)
        async with leaving.running():
            await eventually(lambda: leaving.trusts(1))
            await eventually(leaving.is_ready)
            await book(leaving, "a")
            await book(leaving, "b")
            assert await count(staying, "inherited_total") == 0
        assert await count(staying, "inherited_total") == 2
        assert await load(staying) == (80, 10)
        await eventually(lambda: count_is(staying, "known", 0))  # silent for 5 s
        assert await load(staying) == (80, 10)
        answer = await staying.post("/reservations/a/prefill_complete", {})
        assert answer.is_success, answer.text
        for request_id in ("a", "b"):
            assert (await staying.client.delete(f"/reservations/{request_id}")).is_success
        assert await load(staying) == (0, 0)


@pytest.fixture
async def heir(bus):
    """A router that is nothing but its inbox: a test says what it says."""
    messages = asyncio.Queue()

    async def keep(message):
        messages.put_nowait(decode_replica_message(message.data))

    await bus.client.subscribe(SUBJECTS.to_replica(7), cb=keep)

    async def heard(kind):
        async with asyncio.timeout(60):
            while not isinstance(message := await messages.get(), kind):
                pass
            return message

    return heard


async def test_an_end_that_comes_while_a_request_is_handed_over_reaches_the_heir(
    nats_server, bus, heir, monkeypatch
):
    """Progress reported elsewhere, and passed on to the router that has it no more."""
    monkeypatch.setattr("router.ingest.replica_sync.GIVE_S", 60.0)
    leaving = RunningRouter(nats_server.url, name="leaving")
    freed = ProgressTold("a", ReservationFreed())

    async def is_known():
        greeting = encode_replica_message(Frame(7, 1, 0, (), (), (), 0, 0))
        await bus.client.publish(SUBJECTS.reservations(7), greeting)
        return await count(leaving, "known") == 1

    async with leaving.running():
        await leaving.worker(1)
        await eventually(leaving.is_ready)
        await eventually(is_known)
        await book(leaving, "a")
        leaving.stop()
        assert (await heir(HandedOver)).request_ids == ["a"]
        inbox = SUBJECTS.to_replica(leaving.config.router_id)
        await bus.client.publish(inbox, encode_replica_message(freed))  # a caller's
        await bus.client.publish(inbox, encode_replica_message(freed))  # ours: we have it
        assert await heir(ProgressTold) == freed


async def test_a_lost_bus_costs_nothing_that_counts(routers, nats_server):
    first, second = routers.routers
    await book(first, "a")
    await until_loaded(second, (40, 10))
    nats_server.kill()
    await eventually(lambda: says_degraded(first, "not connected"))
    await book(first, "b", [*PROMPT[:20], 99])
    await first.client.delete("/reservations/a")
    nats_server.start()
    await until_loaded(second, (21, 6))
    ids = {each.request_id for m in second.service.host.core.foreign.replicas
           for each in m.reservations}  # fmt: skip
    assert ids == {"b"}


async def says_degraded(router, text):
    return text in str((await router.client.get("/ready?verbose")).json().get("degraded"))


async def test_unreadable_messages_are_dropped_and_counted(routers, bus):
    first, _ = routers.routers
    await bus.client.publish(SUBJECTS.reservations(7), b"garbage")
    stray = encode_replica_message(Frame(7, 1, 1, (), (), (), 0, 0))
    await bus.client.publish(SUBJECTS.reservations(8), stray)
    name = 'messages_total{kind="unreadable"}'
    await eventually(lambda: count_is(first, name, 2))
    assert await count(first, "known") == 1


async def test_router_without_replica_sync_shares_nothing(routers):
    alone = await routers.start("r3", router_replica_sync=False)
    await book(alone, "a")
    await book(routers.routers[0], "b")
    await until_loaded(routers.routers[1], (40, 10))
    assert await load(alone) == (40, 10)
    assert await count(alone, "known") is None

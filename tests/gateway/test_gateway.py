"""A real Envoy before a picker: every way in which gateways use one, and what breaks."""

import asyncio
import json
import os
import random
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from support.engines.upstreams import STREAM_END, STREAM_HEAD, event, response
from support.fleets.gateways import ChunkedEngine, Envoy
from support.processes.processes import Process
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port

pytestmark = pytest.mark.gateway

CHAOS_S = float(os.environ.get("GATEWAY_CHAOS_S", "6"))
"""600 by hand: `make test-gateway GATEWAY_CHAOS_S=600`."""

COMPLETION = {"model": "default", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}
LIMITS = httpx.Limits(max_connections=2000)


class Fleet:
    """A router with a picker, two engines, and an Envoy before them."""

    def __init__(self, router, engines, envoy, client):
        self.router, self.engines, self.envoy, self.client = router, engines, envoy, client

    async def post(self, **fields):
        return await self.client.post(
            f"{self.envoy.url}/v1/completions", json={**COMPLETION, **fields}
        )

    async def active_requests(self):
        loads = (await self.router.client.get("/loads")).json()
        return sum(rank["active_requests"] for scope in loads for rank in scope["loads"])

    async def until_free(self):
        async def is_free():
            return await self.active_requests() == 0

        await eventually(is_free)

    async def until_active(self, count):
        async def is_active():
            return await self.active_requests() == count

        await eventually(is_active)

    def bodies(self):
        return [each for engine in self.engines for each in engine.bodies]

    async def ended(self, how):
        return await self.router.metric(f'kv_router_epp_requests_total{{ended="{how}"}}') or 0


@asynccontextmanager
async def fleet(tmp_path, then=None, variant=None, known=(0, 1), **fields):
    """`then`: what engines do with requests; `known`: engines that Envoy knows, by number."""
    port = free_port()
    settings = {"epp_port": port, "probe_interval_s": 0.0, **fields}
    one, two = ChunkedEngine(answers), ChunkedEngine(answers)
    async with one.running(), two.running(), RunningRouter("", **settings).running() as router:
        for worker_id, engine in enumerate((one, two), 1):
            worker = {"worker_id": worker_id, "endpoint": engine.url, "block_size": 4}
            assert (await router.post("/workers", worker)).status_code == 201
        addresses = [f"127.0.0.1:{each.port}" for each in (one, two)]
        shown = [addresses[number] for number in known]
        envoy = Envoy(tmp_path, port, shown, **{"has_tls": True, **(variant or {})})
        async with envoy.running(), httpx.AsyncClient(timeout=60, limits=LIMITS) as client:
            found = Fleet(router, (one, two), envoy, client)
            await eventually(lambda: _is_listed(found))
            for engine in (one, two):
                engine.script = then or answers
            yield found
            await found.until_free()


async def _is_listed(fleet):
    """Whether the picker has its list of workers."""
    answered = await fleet.client.get(f"{fleet.envoy.url}/v1/models")
    return answered.status_code == 200 or "subset" in answered.text


async def answers(engine, writer):
    writer.write(response(json.dumps({"served_by": engine.port}).encode()))
    await writer.drain()


async def streams(_, writer):
    writer.write(STREAM_HEAD)
    for number in range(20):
        writer.write(event({"choices": [{"text": str(number)}]}))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(event(b"[DONE]") + STREAM_END)
    await writer.drain()


async def begins(_, writer):
    """Begin a stream that never ends."""
    writer.write(STREAM_HEAD + event({"choices": [{"text": "a"}]}))
    await writer.drain()
    await asyncio.Event().wait()


VARIANTS = {
    "streamed": {},
    "without_tls": {"has_tls": False},
    "response_bodies": {"response_body": "FULL_DUPLEX_STREAMED"},
    "buffered": {"request_body": "BUFFERED"},
    "original_destination": {"is_original_destination": True},
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_request_reaches_the_chosen_engine_whole(tmp_path, name):
    variant, fields = VARIANTS[name], {}
    if name == "without_tls":
        fields["epp_tls"] = False
    async with fleet(tmp_path, streams, variant, **fields) as found:
        sizes = [4, 100_000 if name == "buffered" else 200_000]  # Envoy buffers 1 MiB
        for size in sizes:
            answer = await found.post(prompt=list(range(size)), stream=True)
            assert (answer.status_code, answer.text.count("data:")) == (200, 21), answer.text
        lengths = sorted(len(json.loads(each)["prompt"]) for each in found.bodies())
        assert lengths == sizes
        await found.until_free()
        stats = await found.envoy.stats()
        assert (stats["spurious_msgs_received"], stats["streams_failed"]) == (0, 0)
        assert stats["rejected_header_mutations"] == 0


async def test_booking_lasts_as_long_as_the_answer(tmp_path):
    async with fleet(tmp_path, then=begins) as found:
        async with found.client.stream(
            "POST", f"{found.envoy.url}/v1/completions", json=COMPLETION
        ) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data:")
            assert await found.active_requests() == 1
        await found.until_free()
        assert await found.ended("answered") >= 1


async def test_two_pickers_without_a_bus_place_by_what_both_have_booked(tmp_path):
    ports, pickers = (free_port(), free_port()), (free_port(), free_port())
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    routers = [
        RunningRouter("", name=f"r{port}", http_port=port, epp_port=picker, router_peers=peers,
                      use_kv_events=False, probe_interval_s=0.0)
        for port, picker in zip(ports, pickers, strict=True)
    ]  # fmt: skip
    engines = [ChunkedEngine(answers), ChunkedEngine(answers)]
    envoy = Envoy(tmp_path, pickers, [f"127.0.0.1:{each.port}" for each in engines], has_tls=True)
    async with AsyncExitStack() as stack:
        for each in (*engines, *routers):
            await stack.enter_async_context(each.running())
        for router in routers:
            for worker_id, engine in enumerate(engines, 1):
                worker = {"worker_id": worker_id, "endpoint": engine.url, "block_size": 4}
                assert (await router.post("/workers", worker)).status_code == 201
            await eventually(router.is_ready)
        await stack.enter_async_context(envoy.running())
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=LIMITS))
        found = [Fleet(each, engines, envoy, client) for each in routers]
        await eventually(lambda: _both_listed(found))
        for engine in engines:
            engine.script, engine.bodies[:] = begins, []
        async with AsyncExitStack() as held:
            for number in range(8):
                fields = {**COMPLETION, "prompt": [number] * 40, "stream": True}
                stream = client.stream("POST", f"{envoy.url}/v1/completions", json=fields)
                answer = await held.enter_async_context(stream)
                assert answer.status_code == 200
                for each in found:  # the other one knows of it before the next one comes
                    await each.until_active(number + 1)
            assert [len(engine.bodies) for engine in engines] == [4, 4]
            streams_of = [await each.metric("kv_router_epp_streams") for each in routers]
            assert streams_of == [4, 4]
        for each in found:
            await each.until_free()


async def _both_listed(fleets):
    """Whether both pickers have their lists: Envoy asks them in turn."""
    return all([await _is_listed(each) for each in fleets for _ in range(2)])


async def test_client_that_vanishes_before_an_answer_leaves_no_booking(tmp_path):
    async def hangs(_, __):
        await asyncio.Event().wait()

    async with fleet(tmp_path, then=hangs) as found:
        asking = asyncio.create_task(found.post())
        await found.until_active(1)
        asking.cancel()
        await found.until_free()


async def test_refusals_reach_the_client_in_its_format(tmp_path):
    async with fleet(tmp_path, variant={"subset": ["10.9.9.9:1"]}) as found:
        assert (await found.post()).status_code == 503
        assert (await found.post()).json()["error"]["code"] == "no_endpoints"
    async with fleet(tmp_path) as found:
        broken = await found.client.post(
            f"{found.envoy.url}/v1/completions",
            content=b"{",
            headers={"content-type": "application/json"},
        )
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "malformed_body")


async def test_endpoint_that_the_gateway_does_not_know_is_booked_where_it_is_served(tmp_path):
    async with fleet(tmp_path, begins, known=(0,)) as found:
        tasks = [asyncio.create_task(found.post(prompt=[number] * 40)) for number in range(6)]
        await found.until_active(6)

        async def all_on_the_first():
            loads = (await found.router.client.get("/loads")).json()[0]["loads"]
            return {each["worker_id"]: each["active_requests"] for each in loads} == {1: 6, 2: 0}

        await eventually(all_on_the_first)
        for task in tasks:
            task.cancel()


async def test_thousand_requests_in_flight_are_all_answered_and_freed(tmp_path):
    are_all_there = asyncio.Event()

    async def waits(engine, writer):
        await are_all_there.wait()
        await answers(engine, writer)

    # Health checks of a second would fail: clients, engines and picker share one process here.
    async with fleet(tmp_path, waits, {"is_checked": False}) as found:
        bodies = [{**COMPLETION, "prompt": [number, *range(200)]} for number in range(1000)]
        asking = [asyncio.create_task(_status(found.envoy.port, each)) for each in bodies]
        await found.until_active(1000)
        are_all_there.set()
        assert set(await asyncio.gather(*asking)) == {b"200"}
        await found.until_free()


async def _status(port, body):
    """The status of a request on a connection of its own; a pool visits all of a thousand."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        answer = await reader.read()
    finally:
        writer.close()
    return answer.split()[1] if answer else b""


async def test_engine_that_refuses_before_it_has_read_a_long_body_is_heard(tmp_path):
    async def refuses(_, writer):
        writer.write(response(b'{"error": "too long"}', "413 Too Large"))
        await writer.drain()

    async with fleet(tmp_path, refuses) as found:
        for _ in range(5):
            answer = await found.post(prompt=list(range(200_000)))
            assert (answer.status_code, answer.json()) == (413, {"error": "too long"})


async def test_killed_gateway_leaves_no_booking(tmp_path):
    async with fleet(tmp_path, begins) as found:
        tasks = [asyncio.create_task(found.post()) for _ in range(4)]
        await found.until_active(4)
        found.envoy.kill()
        await found.until_free()
        await asyncio.wait(tasks)
        for task in tasks:
            assert isinstance(task.exception(), httpx.HTTPError)


async def test_subset_hint_of_the_gateway_is_kept(tmp_path):
    async with fleet(tmp_path) as found:
        address = f"127.0.0.1:{found.engines[1].port}"
        epp = found.router.config.picker.epp_port
        every = [f"127.0.0.1:{each.port}" for each in found.engines]
        async with Envoy(tmp_path, epp, every, subset=[address]).running() as limited:
            for number in range(6):
                body = {**COMPLETION, "prompt": [number] * 9}
                answer = await found.client.post(f"{limited.url}/v1/completions", json=body)
                assert answer.json() == {"served_by": found.engines[1].port}


async def test_access_log_ends_bookings(tmp_path):
    async with fleet(tmp_path, epp_ends="access_log") as found:
        assert (await found.post()).status_code == 200
        await found.until_free()
        name = 'kv_router_epp_access_log_entries_total{outcome="ended"}'
        assert await found.router.metric(name) >= 1


class Processes:
    """A router and a picker as processes, with an Envoy before them."""

    def __init__(self, directory, engines):
        self.port, self.router_port = free_port(), free_port()
        # Bookings of a killed picker expire.
        router = {"http-port": self.router_port, "reservation-ttl-s": 2}
        self.router = Process(directory, "router", "router", "serve", **router)
        options = {
            "router-url": f"http://127.0.0.1:{self.router_port}",
            "http-port": free_port(),
            "epp-port": self.port,
            "epp-health-port": free_port(),
            "drain-s": 8,
        }
        self.metrics = f"http://127.0.0.1:{options['http-port']}"
        self.picker = Process(directory, "epp", "router", "epp", **options)
        self.engines = engines

    async def register(self, client):
        for worker_id, engine in enumerate(self.engines, 1):
            worker = {"worker_id": worker_id, "endpoint": engine.url, "block_size": 4}

            def registering(worker=worker):
                return client.post(f"{self._at}/workers", json=worker)

            await eventually(lambda ask=registering: is_answered(ask(), 201))
        await eventually(lambda: is_answered(client.get(f"{self.metrics}/ready")))

    @property
    def _at(self):
        return f"http://127.0.0.1:{self.router_port}"

    async def active_requests(self, client):
        loads = (await client.get(f"{self._at}/loads")).json()
        return sum(rank["active_requests"] for scope in loads for rank in scope["loads"])

    def end(self):
        self.picker.end()
        self.router.end()


@pytest.fixture
async def processes(tmp_path):
    one, two = ChunkedEngine(answers), ChunkedEngine(answers)
    async with one.running(), two.running(), httpx.AsyncClient(timeout=60) as client:
        found = Processes(tmp_path, (one, two))
        try:
            await found.register(client)
            yield found, client, [f"127.0.0.1:{each.port}" for each in (one, two)]
        finally:
            found.end()


async def test_killed_picker_fails_open_or_closed_as_the_gateway_says(processes, tmp_path):
    found, client, engines = processes
    opened = Envoy(tmp_path, found.port, engines, fails_open=True)
    closed = Envoy(tmp_path, found.port, engines)
    async with opened.running(), closed.running():
        for envoy in (opened, closed):
            answer = await client.post(f"{envoy.url}/v1/completions", json=COMPLETION)
            assert answer.status_code == 200
        found.picker.kill()
        for envoy, status in ((opened, 200), (closed, 503)):

            async def is_known(envoy=envoy, status=status):
                answer = await client.post(f"{envoy.url}/v1/completions", json=COMPLETION)
                return answer.status_code == status or (status == 503 and answer.is_error)

            await eventually(is_known)

        async def is_free():
            return await found.active_requests(client) == 0

        await eventually(is_free)


async def test_stopping_picker_is_not_ready_first_and_answers_on(processes, tmp_path):
    found, client, engines = processes
    async with Envoy(tmp_path, found.port, engines, fails_open=True).running() as envoy:
        url = f"{envoy.url}/v1/completions"
        assert (await client.post(url, json=COMPLETION)).status_code == 200
        found.picker.popen.terminate()
        statuses = set()

        async def is_over():
            statuses.add((await client.post(url, json=COMPLETION)).status_code)
            return found.picker.popen.poll() is not None

        await eventually(is_over)
        assert statuses == {200}
        assert (await client.post(url, json=COMPLETION)).status_code == 200  # by the fallback


async def test_stalled_picker_holds_requests_until_it_goes_on(processes, tmp_path):
    found, client, engines = processes
    async with Envoy(tmp_path, found.port, engines, is_checked=False).running() as envoy:
        url = f"{envoy.url}/v1/completions"
        assert (await client.post(url, json=COMPLETION)).status_code == 200
        begun = (await envoy.stats())["streams_started"]
        found.picker.pause()
        asking = asyncio.create_task(client.post(url, json=COMPLETION))
        vanishing = asyncio.create_task(client.post(url, json=COMPLETION))

        async def are_held():
            return (await envoy.stats())["streams_started"] == begun + 2

        await eventually(are_held)
        vanishing.cancel()
        found.picker.go_on()
        assert (await asking).status_code == 200

        async def is_free():
            return await found.active_requests(client) == 0

        await eventually(is_free)


class Chaos:
    """Clients that ask, wait or vanish, before a gateway and a picker that are killed or stall."""

    def __init__(self, processes, envoy, seed=1):
        self.processes, self.envoy = processes, envoy
        self.random = random.Random(seed)
        self.statuses = set()

    async def clients(self):
        while True:
            body = {**COMPLETION, "prompt": [self.random.randrange(9) for _ in range(40)]}
            patience_s = self.random.choice((0.002, 0.02, 0.2, 5.0))
            try:
                async with asyncio.timeout(patience_s):
                    self.statuses.add(await _status(self.envoy.port, body))
            except (TimeoutError, OSError):
                await asyncio.sleep(0.005)

    async def faults(self, seconds):
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while loop.time() < until_s:
            await asyncio.sleep(self.random.uniform(0.3, 1.0))
            fault = self.random.choice((self._stall, self._restart_picker, self._restart_envoy))
            await fault()

    async def _stall(self):
        self.processes.picker.pause()
        await asyncio.sleep(self.random.uniform(0.1, 0.6))
        self.processes.picker.go_on()

    async def _restart_picker(self):
        self.processes.picker.kill()
        await asyncio.sleep(0.2)
        self.processes.picker.start()

    async def _restart_envoy(self):
        self.envoy.restart()


@pytest.mark.timeout(CHAOS_S + 600)
async def test_chaos_leaves_no_booking(processes, tmp_path):
    found, client, engines = processes
    async with Envoy(tmp_path, found.port, engines, is_checked=False).running() as envoy:
        chaos = Chaos(found, envoy)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chaos.clients()) for _ in range(16)]
            await chaos.faults(CHAOS_S)
            for task in tasks:
                task.cancel()
        assert b"200" in chaos.statuses

        async def is_free():
            return await found.active_requests(client) == 0

        def completing():
            return client.post(f"{envoy.url}/v1/completions", json=COMPLETION)

        await eventually(lambda: is_answered(completing()))  # the picker, or Envoy, may start yet
        await eventually(is_free)
        metrics = (await client.get(f"{found.metrics}/metrics")).text.splitlines()
        held = [line for line in metrics if line.startswith(HELD)]
        assert [float(line.rpartition(" ")[2]) for line in held] == [0.0] * len(HELD)


async def is_answered(request, status=200):
    """Whether a request is answered with this status; a server may be away."""
    try:
        return (await request).status_code == status
    except httpx.HTTPError:
        return False


HELD = ("kv_router_epp_streams ", "kv_router_epp_bookings ", "kv_router_epp_body_bytes ")

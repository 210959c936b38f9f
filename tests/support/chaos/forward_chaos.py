"""Forwarding among engines that misbehave, clients that vanish and routers that die.

    PYTHONPATH=.:tests python tests/support/chaos/forward_chaos.py [--seconds 600] [--seed 1]

Five engines hang, trickle, send garbage, close in the middle, refuse, redirect; clients hang up
whenever they like; two routers are killed, or stopped, and started again in turn. Every answer that
came whole is compared with what it has to be; every other has to be some engine's doing. At the end
no router has a reservation left, none expired, and no request is being answered.
"""

import argparse
import asyncio
import faulthandler
import json
import random
import re
import sys
import tempfile
import time
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx

from router.runtime.bus.connection import connection
from support.chaos.chaos_clients import Clients
from support.chaos.chaos_engines import Engine
from support.processes.processes import Process
from support.processes.running import FakeWorker
from support.processes.servers import NatsServer, eventually, free_port

ENGINES, CLIENTS, ROUTERS = 5, 12, 2
PATIENCE_S = 3.0
"""Of the process that forwards, with engines that say nothing."""

SETTLING_S = 300.0
"""For all beside the chaos itself; a longer wait would be for ever."""

SAID_EVERY_S = 10.0
STALL_S = PATIENCE_S / 4
NUMBERS = {
    "booked": "kv_router_reservations",
    "booked by others": "kv_router_replica_reservations",
    "expired": 'kv_router_reservations_dropped_total{reason="expired"}',
    "being answered": "kv_router_forward_in_flight",
}


class Server:
    """A process that serves HTTP, and its numbers."""

    def __init__(self, directory, label, command, **options):
        self.name = label
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        options = {"http-port": port, "drain-s": 0, "namespace": "test", **options}
        self.process = Process(directory, label, "router", command, **options)

    async def is_ready(self, client):
        assert self.process.popen.poll() is None, self.process.log.read_text()[-2000:]
        try:
            return (await client.get(f"{self.url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def numbers(self, client):
        """Those of NUMBERS that it knows, by name; none while it cannot be asked."""
        try:
            text = (await client.get(f"{self.url}/metrics")).text
        except httpx.HTTPError:
            return {}
        found = {
            name: re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
            for name, line in NUMBERS.items()
        }
        return {name: float(value[1]) for name, value in found.items() if value}


class Chaos:
    """One run. `doing`: what it waits for."""

    def __init__(self, seed, directory, nats_url):
        self.dice = random.Random(seed)
        self.directory = directory
        self.nats_url = nats_url
        self.begun = self.restarts = 0
        self.doing = "nothing yet"
        self.routers = []
        self.forward = None
        self.said = {}
        faults = {}
        self.clients = Clients(self.dice, faults)
        self.engines = [
            Engine(each, random.Random(seed + each), faults) for each in range(1, ENGINES + 1)
        ]

    async def run(self, seconds):
        """Raises AssertionError."""
        limit_s = seconds + SETTLING_S
        try:
            async with asyncio.timeout(limit_s), httpx.AsyncClient() as self.client:
                await self._run(seconds)
        except TimeoutError as error:
            raise AssertionError(f"gave up while {self.doing}; at most {limit_s:g} s") from error

    async def progress(self):
        """How far it is, in numbers."""
        clients = self.clients
        now_s = time.monotonic()
        waiting_s = max((now_s - since_s for since_s in clients.waiting.values()), default=0.0)
        said = {
            "requests": clients.requests,
            "restarts": self.restarts,
            "stalls": clients.stalls,
            "doing": self.doing,
            "longest wait": round(waiting_s, 1),
            **clients.summary(),
        }
        servers = [each for each in (*self.routers, self.forward) if each is not None]
        return {**said, **{each.name: await each.numbers(self.client) for each in servers}}

    async def _run(self, seconds):
        async with AsyncExitStack() as stack:
            self.doing = "starting engines"
            for engine in self.engines:
                await stack.enter_async_context(engine.upstream.running())
            bus = await stack.enter_async_context(connection(self.nats_url, "w", lambda _: None))
            for engine in self.engines:
                telling = asyncio.create_task(self._worker(bus, engine))
                stack.push_async_callback(asyncio.wait, [telling])
                stack.callback(telling.cancel)
            stack.callback(self._end_processes)
            self.routers = [await self._router() for _ in range(ROUTERS)]
            self.forward = self._forward()
            await eventually(lambda: self.forward.is_ready(self.client))
            try:
                await self._disturbed(seconds)
                await self._check_books()
            finally:
                self.said = await self.progress()

    def _forward(self):
        self.doing = "starting to forward"
        patience = {"first-byte-timeout-s": PATIENCE_S, "idle-timeout-s": PATIENCE_S}
        options = {**patience, "breaker-open-s": 0.2, "max-attempts": ENGINES}
        return self._server("forward", "forward", **options)

    def _server(self, label, command, **options):
        return Server(self.directory, label, command, **{"nats-url": self.nats_url, **options})

    def _end_processes(self):
        for each in (*self.routers, self.forward):
            if each is not None:
                each.process.end()

    async def _disturbed(self, seconds):
        ends_s = time.monotonic() + seconds
        noting = asyncio.create_task(self._note_stalls())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._disturb_routers(ends_s))
            for _ in range(CLIENTS):
                group.create_task(self.clients.ask_until(ends_s, self.forward.url))
        noting.cancel()

    async def _note_stalls(self):
        while True:
            due_s = time.monotonic() + STALL_S
            await asyncio.sleep(STALL_S)
            self.clients.stalls += time.monotonic() > due_s + STALL_S

    async def _worker(self, bus, engine):
        """What routers see of an engine, for as long as all this lasts."""
        worker = FakeWorker(bus, engine.worker_id, endpoint=engine.upstream.url)
        announcer = await worker.announce()
        await worker.deliver()
        await asyncio.gather(announcer.run(), worker.report_forever())

    async def _router(self):
        self.begun += 1
        name = f"r{self.begun}"
        self.doing = f"starting router {name}"
        router = self._server(name, "serve", name=name, **{"reservation-ttl-s": 86_400.0})
        try:
            await eventually(lambda: router.is_ready(self.client))
        except BaseException:
            router.process.end()
            raise
        return router

    async def _disturb_routers(self, ends_s):
        """One after the other dies without a word, or stops as it should; there is always one."""
        while time.monotonic() < ends_s:
            self.doing = "disturbing"
            await asyncio.sleep(self.dice.uniform(2, 6))
            router, *others = self.routers
            await self._ended(router)
            self.routers = [*others, await self._router()]
            self.restarts += 1
        self.doing = "waiting for clients"

    async def _ended(self, router):
        how = self.dice.choice(("killed", "stopped"))
        self.doing = f"router {router.name} is {how}"
        end = router.process.kill if how == "killed" else router.process.stop
        await asyncio.to_thread(end)

    # ── The end ──────────────────────────────────────────────────────────────────────────────────

    async def _check_books(self):
        self.doing = "waiting until no request is answered"
        await eventually(self._no_request_is_answered)
        self.doing = "waiting until nothing is booked"
        await eventually(self._nothing_is_booked)
        self.doing = "looking back"
        for router in self.routers:
            assert not (await router.numbers(self.client)).get("expired"), "reservations expired"
        assert self.clients.outcomes["whole"], self.clients.outcomes
        assert not self.clients.wrong, self.clients.wrong[:10]

    async def _no_request_is_answered(self):
        numbers = await self.forward.numbers(self.client)
        return numbers.get("being answered") == 1  # the client that asks this

    async def _nothing_is_booked(self):
        every = [await router.numbers(self.client) for router in self.routers]
        return all((each.get("booked"), each.get("booked by others")) == (0, 0) for each in every)


@contextmanager
def bus():
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            yield Path(folder), server.url
        finally:
            server.kill()


async def say_forever(chaos):
    """How far it is, now and then."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(SAID_EVERY_S)
        say({"after_s": round(time.monotonic() - began_s), **await chaos.progress()})


def say(what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(seconds, seed):
    # A client that is not done by then, without an error, has a loop that stands still.
    faulthandler.dump_traceback_later(seconds + 1.5 * SETTLING_S, exit=True)
    with bus() as (folder, url):
        chaos = Chaos(seed, folder, url)
        saying = asyncio.create_task(say_forever(chaos))
        try:
            await chaos.run(seconds)
        except BaseException as error:
            say({"verdict": "failed", "seed": seed, "because": repr(error), **chaos.said})
            raise
        finally:
            saying.cancel()
    say({"verdict": "clean", "seed": seed, **chaos.said})
    say("no reservation is left, and every failure was an engine's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.seconds, arguments.seed)))

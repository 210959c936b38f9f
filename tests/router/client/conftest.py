"""Clients of a router, over HTTP and NATS on links that can be made bad, and in its process."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from router.client import ClientSettings, Retries, RouterClient
from support.processes.listening import listening
from support.processes.proxies import NONE, Faults, Proxy
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port

RETRIES = Retries(attempts=20, longest_pause_s=1.0)
PATIENT = ClientSettings(timeout_s=30.0, max_wait_s=2.0, retries=RETRIES)
IMPATIENT = ClientSettings(timeout_s=2.0, max_wait_s=2.0, retries=RETRIES)
"""For answers that never come."""


class HttpLink:
    """Stands before a router; may lose answers, by cutting the connection that they come on."""

    def __init__(self, router):
        self.port = free_port()
        self.target = router
        self.loses_answers = False
        self.lost = 0
        self._writers = set()

    def turn_to(self, router):
        """Whatever is asked from now on is asked of this one."""
        self.target = router
        for each in self._writers:
            each.close()

    async def serve(self, reader, writer):
        self._writers.add(writer)
        try:
            with suppress(OSError):
                await self._link(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _link(self, reader, writer):
        router_reader, router_writer = await asyncio.open_connection(
            "127.0.0.1", self.target.client.base_url.port
        )
        back = asyncio.create_task(self.pump(router_reader, writer, is_answer=True))
        try:
            await self.pump(reader, router_writer, is_answer=False)
            await back
        finally:
            back.cancel()
            router_writer.transport.abort()

    async def pump(self, reader, writer, *, is_answer):
        while data := await reader.read(1 << 16):
            if is_answer and self.loses_answers:
                self.lost += 1
                break
            writer.write(data)
        writer.close()

    def lose_answers(self, *, loses):
        self.loses_answers = loses


class NatsLink(Proxy):
    """The same between a client and nats-server; a request waits in vain."""

    target = None

    def lose_answers(self, *, loses):
        self.set_faults(Faults(lost=1.0, about=b"_INBOX") if loses else NONE)

    @property
    def lost(self):
        return self.counts["lost"]


@asynccontextmanager
async def over_http(router, _, settings=PATIENT, **options):
    link = HttpLink(router)
    async with listening(link.serve, link.port):
        url = f"http://127.0.0.1:{link.port}"
        async with RouterClient.over_http(url, settings=settings, **options) as client:
            client.link = link
            yield client


@asynccontextmanager
async def over_nats(router, nats_server, settings=PATIENT, **options):
    async with (
        NatsLink(nats_server.port) as link,
        RouterClient.over_nats(link.url, "test", settings=settings, **options) as client,
    ):
        client.link = link
        await eventually(lambda: listens(client))
        yield client


@asynccontextmanager
async def in_process(router, _):
    commands = router.service.commands
    async with RouterClient.in_process(commands, settings=PATIENT) as client:
        yield client


async def listens(client):
    try:
        await client.loads()
    except Exception:  # noqa: BLE001 - not yet
        return False
    return True


@pytest.fixture(params=[over_http, over_nats], ids=["http", "nats"])
def connect(request):
    return request.param


@pytest.fixture
def connect_http():
    return over_http


@pytest.fixture
async def fleet(nats_server):
    async with RunningRouter(nats_server.url).running() as router:
        await router.worker(1)
        yield router


@pytest.fixture(params=[over_http, over_nats, in_process], ids=["http", "nats", "process"])
async def client(fleet, nats_server, request):
    async with request.param(fleet, nats_server) as client:
        client.fleet = fleet
        yield client


@pytest.fixture
async def remote_client(fleet, nats_server, connect):
    async with connect(fleet, nats_server) as client:
        client.fleet = fleet
        yield client


@pytest.fixture
async def impatient(fleet, nats_server, connect):
    async with connect(fleet, nats_server, IMPATIENT) as client:
        yield client

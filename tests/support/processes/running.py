"""A whole router, in process, on a real bus."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import msgspec

from router.config.router import RouterConfig
from router.protocol.catalogue import encode_entry, worker_key
from router.protocol.events import encode_log_message
from router.protocol.loads import encode_load_report
from router.protocol.subjects import Subjects
from router.publisher.journal.journal import EventJournal
from router.publisher.load_publisher import ReceivedBeacons
from router.runtime.bus.connection import StreamLimits, connection
from router.runtime.bus.kv_lease import KvLease
from router.runtime.bus.transport import NatsTransport
from router.runtime.process.settings import configured
from router.service.router import RouterService
from support.processes.servers import NO_TLS, eventually, free_port
from support.values.builders import announcement, report
from worker_agent.process.control import listen_for_beacons

SUBJECTS = Subjects("test")


class FakeWorker:
    """An agent reduced to what the bus sees of one: announcement, log, reports."""

    def __init__(self, bus, worker_id, **fields):
        self.announcement = announcement(worker_id, **fields)
        self.bus = bus
        self.transport = NatsTransport(bus, SUBJECTS, StreamLimits())
        incarnation, identity = self.announcement.incarnation, self.announcement.identity
        self.journals = {
            rank: EventJournal(rank, incarnation, identity) for rank in self.announcement.ranks
        }
        self.is_reporting = True
        self.beacons = ReceivedBeacons()

    async def announce(self):
        key = worker_key(self.announcement.worker_id)
        announcer = KvLease(self.bus.js, SUBJECTS, key, self.announcement.incarnation)
        await announcer.look()
        await announcer.claim(encode_entry(self.announcement))
        return announcer

    async def deliver(self, rank=None):
        for each in self.journals if rank is None else (rank,):
            subject = SUBJECTS.events(each)
            for message in self.journals[each].take():
                await self.transport.append(
                    subject,
                    encode_log_message(message),
                    expected_sequence=await self.transport.last_sequence(subject),
                )

    async def report_forever(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(listen_for_beacons(self.bus, SUBJECTS, self.beacons))
            group.create_task(self._report_forever())

    async def _report_forever(self):
        while True:
            for rank, journal in self.journals.items() if self.is_reporting else ():
                sent = report(
                    rank.worker_id,
                    rank.dp_rank,
                    incarnation=self.announcement.incarnation,
                    event_id=journal.last_event_id,
                    state=journal.taken_state,
                    heard=self.beacons.last(time.monotonic()),
                )
                if self.bus.client.is_connected:
                    await self.bus.client.publish(SUBJECTS.load(rank), encode_load_report(sent))
            await asyncio.sleep(0.1)


class RunningService:
    """A service on a port, and a client of it."""

    def __init__(self, service, port):
        self.service = service
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, verify=NO_TLS
        )
        self._stop = asyncio.Event()
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def running(self):
        self._task = asyncio.create_task(self.service.run(self._stop))
        try:
            await eventually(lambda: self._task.done() or self.is_up())
            assert not self._task.done(), self._task
            yield self
        finally:
            await self._stack.aclose()
            self._stop.set()
            await asyncio.wait([self._task])
            await self.client.aclose()
        if not self._task.cancelled():
            self._task.result()

    def stop(self):
        """Have it end as it should; `running` waits for that."""
        self._stop.set()

    def kill(self):
        """End it without a message."""
        self._task.cancel()

    async def is_up(self):
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def is_ready(self):
        return (await self.client.get("/ready")).status_code == 200

    async def post(self, path, body, **arguments):
        headers = {"content-type": "application/json", **arguments.pop("headers", {})}
        content = msgspec.json.encode(body)
        return await self.client.post(path, content=content, headers=headers, **arguments)

    async def post_a_beginning(self, path):
        """Send a request without the end of its body. Returns the response's status and body."""
        url = self.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 9\r\n\r\n{{".encode())
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])

    async def metric(self, line):
        """The value of a metric, given its line up to the value; None if it is not there."""
        text = (await self.client.get("/metrics")).text
        found = [each for each in text.splitlines() if each.startswith(f"{line} ")]
        return float(found[0].split()[-1]) if found else None


class RunningRouter(RunningService):
    """A router service, and workers for it."""

    def __init__(self, nats_url, **fields):
        port = fields.pop("http_port", None) or free_port()
        # Costs that are counted by hand; and a busy machine's workers are silent for a while, of
        # which these here, that are none, do not recover. Nor do their endpoints name servers.
        foreseeable = {"policy": "dynamo-1.0", "worker_silence_s": 60.0, "check_workers": False}
        settings = {"namespace": "test", "drain_s": 0.0, "name": "r", **foreseeable, **fields}
        self.config = configured(RouterConfig, nats_url=nats_url, http_port=port, **settings)
        super().__init__(RouterService(self.config), port)

    async def worker(self, worker_id, **fields):
        """A fake worker, announced, with its first checkpoint delivered, reporting."""
        bus = await self._stack.enter_async_context(
            connection(self.config.bus.nats_url, f"w{worker_id}", lambda _: None)
        )
        worker = FakeWorker(bus, worker_id, **fields)
        await worker.announce()
        # What comes before the announcement is dropped, and asked for again: this one has no ears.
        await eventually(lambda: self.view(worker_id), poll_s=0.005)
        await worker.deliver()
        reporting = asyncio.create_task(worker.report_forever())
        self._stack.push_async_callback(asyncio.wait, [reporting])
        self._stack.callback(reporting.cancel)
        await eventually(lambda: self.trusts(worker_id))
        await eventually(lambda: self.schedules(worker_id))
        await eventually(lambda: self.service.host.status.answers_on_bus)
        return worker

    async def workers(self, *worker_ids):
        """Start several workers at once."""
        return await asyncio.gather(*map(self.worker, worker_ids))

    async def trusts(self, worker_id):
        view = await self.view(worker_id)
        return view is not None and all(r["trust"]["state"] == "exact" for r in view["ranks"])

    async def schedules(self, worker_id):
        return not (await self.view(worker_id))["not_schedulable_reasons"]

    async def view(self, worker_id):
        answer = await self.client.get(f"/workers/{worker_id}")
        return answer.json() if answer.status_code == 200 else None

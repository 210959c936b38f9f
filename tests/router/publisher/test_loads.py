"""Load reports: every interval, soon after a change, and never in the way."""

import asyncio

import pytest

from builders import report
from router.bus_errors import BusUnavailableError
from router.protocol.loads import decode_load_report
from router.publisher.loads import LoadPublisher
from router.publisher.transport import MemoryTransport


class DeafTransport(MemoryTransport):
    async def broadcast(self, subject, payload):
        raise BusUnavailableError("not connected")


@pytest.fixture
def publisher():
    return LoadPublisher(lambda: report(1, report_id=7), "kv.test.load.1.0", interval_s=0.2)


async def run_for(publisher, transport, seconds):
    task = asyncio.create_task(publisher.run(transport))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])


async def test_reports_at_once_and_every_interval(publisher):
    transport = MemoryTransport()
    await run_for(publisher, transport, 0.5)
    assert len(transport.told) == 3
    subject, payload = transport.told[0]
    assert (subject, decode_load_report(payload)) == ("kv.test.load.1.0", report(1, report_id=7))


async def test_reports_a_change_before_the_interval(publisher):
    publisher = LoadPublisher(lambda: report(1), "s", interval_s=60.0)
    transport = MemoryTransport()
    task = asyncio.create_task(publisher.run(transport))
    await asyncio.sleep(0.05)
    for _ in range(10):
        publisher.changed()
    await asyncio.sleep(0.2)
    task.cancel()
    assert len(transport.told) == 2


async def test_a_report_that_cannot_be_sent_is_counted_and_superseded(publisher):
    await run_for(publisher, DeafTransport(), 0.3)
    assert publisher.missed == 2

"""Load reports: every interval, soon after a change, and never in the way."""

import asyncio

import pytest

from router.protocol.loads import decode_load_report
from router.publisher.load_publisher import LoadPublisher
from router.runtime.bus.errors import BusUnavailableError
from support.fleets.memory_transport import MemoryTransport
from support.values.builders import report


class DeafTransport(MemoryTransport):
    async def broadcast(self, subject, payload):
        raise BusUnavailableError("not connected")


@pytest.fixture
def publisher():
    return LoadPublisher(lambda: report(1, report_id=7), "kv.test.load.1.0", interval_s=0.2)


async def run_for(publisher, transport, seconds):
    task = asyncio.create_task(publisher.run(transport))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.wait([task])


async def test_reports_at_once_and_every_interval(publisher):
    transport = MemoryTransport()
    await run_for(publisher, transport, 0.5)
    assert len(transport.broadcasts) == 3
    subject, payload = transport.broadcasts[0]
    assert (subject, decode_load_report(payload)) == ("kv.test.load.1.0", report(1, report_id=7))


async def test_reports_a_change_before_the_interval(publisher, eventually):
    publisher = LoadPublisher(lambda: report(1), "s", interval_s=60.0)
    transport = MemoryTransport()
    task = asyncio.create_task(publisher.run(transport))
    await eventually(lambda: transport.broadcasts)
    for _ in range(10):
        publisher.changed()
    await asyncio.wait([task], timeout=0.2)
    task.cancel()
    assert len(transport.broadcasts) == 2


async def test_a_report_that_cannot_be_sent_is_counted_and_superseded(publisher):
    await run_for(publisher, DeafTransport(), 0.3)
    assert publisher.missed == 2

"""Poisoned messages are dropped and counted, one at a time."""

import math

import msgspec

from router.protocol.events import EventBatch, encode_log_message, pack_state
from router.protocol.loads import Beacon, encode_beacon, encode_load_report
from router.protocol.values import HeldState
from support.processes.running import SUBJECTS
from support.processes.servers import eventually
from support.values.builders import rank, report

GARBAGE = [b"", b"garbage", b"\x98" * 40, b"\xc1", b"\x00" * 1_000_000]


async def until_counted(plane, sample, count):
    async def is_counted():
        return (await plane.routers[0].metrics()).get(f"kv_router_{sample}", 0) >= count

    await eventually(is_counted)


async def test_poisoned_event_log_is_counted_and_healed(busy, bus):
    subject = SUBJECTS.events(rank(1))
    await busy.change_for(0.5)
    await busy.until_right()
    foreign = [*GARBAGE, *await _false_messages(busy, bus)]
    for payload in foreign:
        await bus.js.publish(subject, payload)
    await until_counted(busy, 'log_messages_total{outcome="unreadable"}', len(foreign))
    await busy.change_for(0.5)
    await busy.until_right()


async def _false_messages(plane, bus):
    """Messages that are nearly right: cut off, of another rank, with events that are none."""
    last = await bus.js.get_last_msg(SUBJECTS.event_stream, SUBJECTS.events(rank(1)))
    other = await bus.js.get_last_msg(SUBJECTS.event_stream, SUBJECTS.events(rank(2)))
    journal = next(iter(plane.edges[1].ranks.values())).journal
    next_id = journal.last_event_id + 1
    state = pack_state(HeldState())
    malformed = [
        EventBatch(
            1, 0, plane.edges[1].incarnation, journal.identity, next_id, next_id, state + tail
        )
        for tail in (b"\x01" + bytes(6) + b"\x05", b"\xff" * 16, b"\x01\x09" + bytes(14), bytes(9))
    ]
    return [last.data[:-5], other.data, *map(encode_log_message, malformed)]


async def test_poisoned_load_reports_and_beacons_are_counted(busy, bus):
    good = encode_load_report(report(1, incarnation=busy.edges[1].incarnation, report_id=1))
    strange = msgspec.msgpack.encode(
        msgspec.msgpack.decode(good) | {"report_id": 10**9, "waiting_s": math.nan, "dp_rank": -1}
    )
    foreign = [*GARBAGE, good[:-3], strange, encode_load_report(report(2))]
    for payload in foreign:
        await bus.client.publish(SUBJECTS.load(rank(1)), payload)
    for payload in [*GARBAGE, encode_beacon(Beacon(1, 2))[:-1], b"\x92\xff\xff"]:
        await bus.client.publish(SUBJECTS.beacons, payload)
    await bus.client.publish("kv.test.load.nobody.0", good)
    await until_counted(busy, 'load_reports_total{outcome="unreadable"}', len(foreign) + 1)
    await busy.change_for(1.0)
    await busy.until_right()


async def test_beacons_of_false_routers_leave_the_index_right(busy, bus):
    """Real ones are crowded out of the reports, which then prove less, never too much."""
    changing = busy.spawn(busy.change_for(1.0))

    async def crowd_out():
        for source_id in range(200):
            await bus.client.publish(SUBJECTS.beacons, encode_beacon(Beacon(source_id, 1)))
        return changing.done()

    await eventually(crowd_out, poll_s=0.05)
    await busy.until_right()

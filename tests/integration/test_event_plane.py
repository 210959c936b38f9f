"""Whatever befalls the event plane, the index is right again, and says meanwhile that it is not."""

import asyncio

import pytest

from builders import rank
from proxies import NONE, Faults
from router.bus_errors import LogFullError
from router.publisher.bus import StreamLimits, ensure_event_stream
from router.publisher.transport import NatsTransport
from running import SUBJECTS
from servers import eventually

ASTRAY = {
    "lost": Faults(lost=0.03),
    "doubled": Faults(doubled=0.1),
    "delayed": Faults(delayed=0.1),
    "slow": Faults(latency_s=0.03, bytes_per_s=100_000),
}


async def test_messages_astray(busy):
    links = busy.links["router-0"], busy.links[1]
    for astray, faults in ASTRAY.items():
        for link in links:
            link.set_faults(faults)
        await busy.change_for(1.2)
        while astray != "slow" and not any(link.counts[astray] for link in links):
            await busy.change_for(0.2)
        for link in links:
            link.set_faults(NONE)
        await busy.until_right()


async def test_reports_that_come_late_prove_nothing_of_now(busy):
    """What a stalled link lets through at last was true when it was sent."""
    changing = busy.spawn(busy.change_for(2.5))
    busy.links["router-0"].stall()
    await asyncio.sleep(1.8)
    busy.links["router-0"].resume()
    await changing
    await busy.until_right()


async def test_links_that_are_cut(busy):
    changing = busy.spawn(busy.change_for(3.0))
    for name in ("router-0", 1, 2, "router-0"):
        await busy.links[name].go_down()
        await asyncio.sleep(0.4)
        busy.links[name].come_up()
        await asyncio.sleep(0.3)
    await changing
    await busy.until_right()


@pytest.mark.parametrize("empty", [False, True], ids=["with its store", "without its store"])
async def test_a_bus_killed_while_events_flow(busy, nats_server, empty):
    changing = busy.spawn(busy.change_for(3.2))
    for down_s in (0.1, 1.0):
        await asyncio.sleep(0.5)
        nats_server.kill()
        await asyncio.sleep(down_s)
        nats_server.start(empty=empty)
    await changing
    await busy.until_right()


async def test_a_full_stream(plane, bus):
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits(max_bytes=1 << 20))
    await plane.router()
    await plane.edge(1, dp_size=2)
    await plane.edge(2)
    await plane.until_right()
    filler = SUBJECTS.events(rank(99))
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    sequence = await _fill(transport, filler)
    await plane.change_for(2.0)
    ranks = [here for edge in plane.edges.values() for here in edge.ranks.values()]
    await eventually(lambda: any(here.events.refusals for here in ranks))
    await eventually(lambda: any(here.events.waiting_s > 0.5 for here in ranks))
    await eventually(lambda: _ranks_not_exact(plane))
    await transport.drop_before(filler, sequence + 1)
    await plane.until_right()


async def _fill(transport, subject):
    """Let somebody else take all the room there is; the last sequence."""
    sequence, size_bytes = 0, 100_000
    while size_bytes > 50:
        try:
            sequence = await transport.append(
                subject, bytes(size_bytes), expected_sequence=sequence
            )
        except LogFullError:
            size_bytes //= 2
    return sequence


async def _ranks_not_exact(plane):
    metrics = await plane.routers[0].metrics()
    trust = [name for name in metrics if name.startswith("kv_router_worker_trust")]
    return [name for name in trust if 'state="exact"' not in name]


async def test_a_router_killed_at_random_points(busy):
    router = busy.routers[0].process
    changing = busy.spawn(busy.change_for(3.5))
    for _ in range(3):
        await asyncio.sleep(busy.rng.uniform(0.1, 1.5))
        router.kill()
        router.start()
    await changing
    await busy.until_right()
    router.kill()
    router.start()
    await busy.until_right()


async def test_one_of_two_routers_killed(busy):
    await busy.router()
    await busy.until_right()
    changing = busy.spawn(busy.change_for(2.0))
    await asyncio.sleep(0.5)
    busy.routers[1].process.kill()
    await changing
    busy.routers[1].process.start()
    await busy.until_right()


async def test_a_router_that_stands_still(busy):
    """What it hears at once afterwards is as old as it is, and is not taken for news."""
    router = busy.routers[0]
    changing = busy.spawn(busy.change_for(4.5))
    await asyncio.sleep(0.3)
    router.process.pause()
    await asyncio.sleep(3.0)
    late = [busy.spawn(busy.ask(router)) for _ in range(9)]
    await asyncio.sleep(0.1)
    router.process.go_on()
    await asyncio.gather(*late)
    await changing
    await busy.until_right()


async def test_a_new_life_by_another_clock(busy):
    for clock_error_s in (-7200, 7200, 0):
        await busy.change_for(0.5)
        edge, link = busy.edges[1], busy.links[1]
        await link.go_down()
        await edge.kill()
        edge.clock_error_s = clock_error_s
        link.come_up()
        edge.start()
        await busy.until_right()


async def test_a_dead_bus_delays_nobody_for_long(busy, nats_server):
    """Changes made while it is away are known soon after it is back."""
    nats_server.kill()
    await busy.change_for(2.0)
    nats_server.start()
    await busy.until_right()

"""Whatever befalls the event plane, the index is right again, and says meanwhile that it is not."""

import asyncio

import pytest

from router.runtime.bus.connection import StreamLimits, ensure_event_stream
from router.runtime.bus.errors import LogFullError
from router.runtime.bus.transport import NatsTransport
from support.processes.proxies import NONE, Faults
from support.processes.running import SUBJECTS
from support.processes.servers import eventually
from support.values.builders import rank

ASTRAY = {
    "lost": Faults(lost=0.03),
    "doubled": Faults(doubled=0.1),
    "delayed": Faults(delayed=0.1),
    "slow": Faults(latency_s=0.03, bytes_per_s=100_000),
}


async def test_lost_doubled_and_delayed_messages_leave_the_index_right(busy):
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


async def test_delayed_reports_do_not_prove_the_present(busy):
    """What a stalled link lets through at last was true when it was sent."""
    busy.links["router-0"].stall()
    await busy.change_for(1.8)
    busy.links["router-0"].resume()
    await busy.change_for(0.7)
    await busy.until_right()


async def test_cut_links_leave_the_index_right(busy):
    for name in ("router-0", 1, 2, "router-0"):
        await busy.links[name].go_down()
        await busy.change_for(0.4)
        busy.links[name].come_up()
        await busy.change_for(0.3)
    await busy.until_right()


@pytest.mark.parametrize("empty", [False, True], ids=["with its store", "without its store"])
async def test_bus_killed_under_load_leaves_the_index_right(busy, nats_server, empty):
    for down_s in (0.1, 1.0):
        await busy.change_for(0.5)
        nats_server.kill()
        await busy.change_for(down_s)
        nats_server.start(empty=empty)
    await busy.change_for(1.1)
    await busy.until_right()


async def test_full_event_stream_recovers_once_it_has_room(plane, bus):
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
    """Fill the stream with another subject. Returns the last sequence."""
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


async def test_router_killed_at_random_points_recovers(busy):
    router = busy.routers[0].process
    for _ in range(3):
        await busy.change_for(busy.rng.uniform(0.1, 1.5))
        router.kill()
        router.start()
    await busy.change_for(1.0)
    await busy.until_right()
    router.kill()
    router.start()
    await busy.until_right()


async def test_one_of_two_killed_routers_recovers(busy):
    await busy.router()
    await busy.until_right()
    await busy.change_for(0.5)
    busy.routers[1].process.kill()
    await busy.change_for(1.5)
    busy.routers[1].process.start()
    await busy.until_right()


async def test_paused_router_recovers(busy):
    """Messages read after the pause are as old as they are, and do not prove the present."""
    router = busy.routers[0]
    await busy.change_for(0.3)
    router.process.pause()
    await busy.change_for(3.0)
    late = [busy.spawn(busy.ask(router)) for _ in range(9)]
    await busy.change_for(0.1)
    router.process.go_on()
    await asyncio.gather(*late)
    await busy.change_for(1.1)
    await busy.until_right()


async def test_new_incarnation_with_an_earlier_clock_is_accepted(busy):
    for clock_error_s in (-7200, 7200, 0):
        await busy.change_for(0.5)
        edge, link = busy.edges[1], busy.links[1]
        await link.go_down()
        await edge.kill()
        edge.clock_error_s = clock_error_s
        link.come_up()
        edge.start()
        await busy.until_right()


async def test_changes_during_a_bus_outage_are_applied_soon_after(busy, nats_server):
    """Changes made while it is away are known soon after it is back."""
    nats_server.kill()
    await busy.change_for(2.0)
    nats_server.start()
    await busy.until_right()

"""When a router is ready."""

from router.core.commands import ApplyPeer, RemoveWorker
from router.observability.health import ServiceStatus
from support.fleets.peers import Other
from support.values.builders import World


def test_a_router_waits_for_its_first_workers_once():
    world = World()
    status = ServiceStatus("", needs_workers=True, initial_workers=2)
    assert status.readiness(world.core).reasons == ["no schedulable workers"]
    world.worker(1)
    assert status.readiness(world.core).reasons == ["1 of 2 initial workers"]
    world.worker(2)
    assert status.readiness(world.core).is_ready
    world.core.handle(RemoveWorker(2, "test"), 0.0)
    assert status.readiness(world.core).is_ready
    world.core.handle(RemoveWorker(1, "test"), 0.0)
    assert status.readiness(world.core).reasons == ["no schedulable workers"]


def test_a_router_names_others_that_share_nothing_or_have_another_block_size():
    world = World(router_id=1)
    world.worker(1)
    status = ServiceStatus("", needs_workers=True)
    assert status.degraded(world.core) == []
    status.peer_problems = lambda: ["router http://r2:8092 shares no reservations: 401"]
    world.core.handle(ApplyPeer(Other().books("a", block_size=16)), 0.0)
    assert status.degraded(world.core) == [
        "worker 1 has blocks of 16 tokens at router 5, of 4 here",
        "router http://r2:8092 shares no reservations: 401",
    ]
    assert status.readiness(world.core).is_ready

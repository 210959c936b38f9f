"""When a router is ready."""

from router.core.commands import RemoveWorker
from router.observability.health import ServiceStatus
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

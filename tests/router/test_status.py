"""When a router is ready."""

from builders import World
from router.status import ServiceStatus


def test_a_router_waits_for_its_first_workers_once():
    world = World()
    status = ServiceStatus("", needs_workers=True, initial_workers=2)
    assert status.readiness(world.core).reasons == ["no schedulable workers"]
    world.worker(1)
    assert status.readiness(world.core).reasons == ["1 of 2 initial workers"]
    world.worker(2)
    assert status.readiness(world.core).is_ready
    world.core.remove_worker(2, "test")
    assert status.readiness(world.core).is_ready
    world.core.remove_worker(1, "test")
    assert status.readiness(world.core).reasons == ["no schedulable workers"]

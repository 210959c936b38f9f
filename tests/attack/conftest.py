"""A deployment for each file of attacks, and what must be true after each of them."""

import pytest

from attack.guarded_fleet import SECRETS, GuardedFleet
from support.processes.servers import until

MOST_GROWTH_BYTES = 64 << 20
"""What an attack may leave in a process's memory: caches, and the allocator's reserve."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with GuardedFleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(deployment):
    """The deployment; after the test it serves as before, and nothing of the attack is left."""
    names = list(deployment.processes)
    before = {name: deployment.resident_bytes(name) for name in names}
    open_before = {name: deployment.descriptors(name) for name in names}
    yield deployment
    for name in names:
        assert deployment.processes[name].popen.poll() is None, f"{name} has ended"
    until(deployment.schedules)
    until(lambda: deployment.reservations() == 0)
    for name in names:
        # Connections of callers are closed in time; those between processes may come and go.
        until(lambda name=name: deployment.descriptors(name) <= open_before[name] + 16)
        growth = deployment.resident_bytes(name) - before[name]
        assert growth < MOST_GROWTH_BYTES, f"{name}: {growth / 1e6:.0f} MB more"
    spoken = deployment.spoken()
    assert [secret for secret in SECRETS if secret in spoken] == []
    assert "Traceback" not in spoken

"""A few seconds of `make chaos`."""

import pytest

from support.chaos.forward_chaos import Chaos

SECONDS = 8.0


@pytest.mark.long
async def test_faults_leave_no_reservation_and_blame_no_healthy_worker(nats_server, tmp_path):
    """Routers are killed, or stopped, in turn; engines misbehave, and clients vanish."""
    chaos = Chaos(5, tmp_path, nats_server.url)
    await chaos.run(SECONDS)
    assert chaos.restarts

"""A few seconds of `make chaos`."""

from forward_chaos import Chaos

SECONDS = 8.0


async def test_whatever_happens_no_reservation_is_left_and_nobody_else_is_to_blame(
    nats_server, tmp_path
):
    """Routers are killed, or stopped, in turn; engines misbehave, and clients vanish."""
    chaos = Chaos(5, tmp_path, nats_server.url)
    await chaos.run(SECONDS)
    assert chaos.restarts

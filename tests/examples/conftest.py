"""Two engines that each hold a text; `make test-integrations` runs the tests with other systems."""

import pytest

from support.fleets.systems import SystemsFleet


@pytest.fixture
async def fleet(tmp_path, nats_server):
    fleet = SystemsFleet(tmp_path, nats_server.url)
    try:
        await fleet.begin()
        yield fleet
    finally:
        await fleet.close()

"""A whole router, in process, on a real bus."""

import pytest

from running import RunningRouter


@pytest.fixture
async def router(nats_server):
    async with RunningRouter(nats_server.url).running() as router:
        yield router

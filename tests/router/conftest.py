"""A whole router, and an index alone, in process, on a real bus."""

import pytest

from support.processes.running import RunningRouter
from support.processes.servers import equals
from support.values.indexing import PROMPT, Engine, RunningIndex, publishing


@pytest.fixture
async def router(nats_server):
    async with RunningRouter(nats_server.url).running() as router:
        yield router


@pytest.fixture
async def index(nats_server):
    async with RunningIndex(nats_server.url).running() as index:
        yield index


@pytest.fixture
async def served(index, bus, eventually):
    """An index alone; its instance 1, registered, holds the prompt."""
    engine = Engine(bus, 1)
    engine.cache(PROMPT)
    assert (await index.register(1)).status_code == 201
    async with publishing(engine):
        await eventually(lambda: equals(index.scores(PROMPT), {"1": {"0": 160}}))
        yield index

"""A client of the selection service, written from its interface, is served here as there."""

import asyncio
import os

import compat
import pytest

from support.fleets.direct import DirectRouter
from support.processes.servers import free_port


async def test_a_client_of_the_other_service_is_served():
    async with DirectRouter().running() as router:
        results = await asyncio.to_thread(compat.run, str(router.client.base_url))
    assert {step: how for step, how in results.items() if how != "ok"} == {}
    assert len(results) > 60


@pytest.mark.dynamo
def test_the_script_is_what_the_other_service_does():
    python = os.environ.get("DYNAMO_PYTHON_1_6_1")
    if python is None:
        pytest.fail("no Python that has Dynamo 1.6.1; `make test-dynamo` names it")
    port = free_port()
    with compat.serving(compat.peer_command(python, port), port) as url:
        results = compat.run(url)
    assert {step: how for step, how in results.items() if how != "ok"} == {}

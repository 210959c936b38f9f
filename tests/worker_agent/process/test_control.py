"""Pings between agents with the same id, with a real server."""

import asyncio

import pytest

from router.runtime.bus.errors import BusUnavailableError, TwinError
from support.processes.running import SUBJECTS
from worker_agent.process import control
from worker_agent.process.control import answer_pings, listen_for_pings, refuse_twin


async def test_without_a_listener_there_is_no_twin(bus):
    await refuse_twin(bus, SUBJECTS, 1)


async def test_twin_that_responds_is_named_by_its_incarnation(bus):
    pings = await listen_for_pings(bus, SUBJECTS, 1)
    answering = asyncio.create_task(answer_pings(pings, 17))
    with pytest.raises(TwinError, match="17 responds"):
        await refuse_twin(bus, SUBJECTS, 1)
    answering.cancel()


async def test_twin_that_does_not_respond_is_alive(bus, monkeypatch):
    monkeypatch.setattr(control, "PING_TIMEOUT_S", 0.05)
    await listen_for_pings(bus, SUBJECTS, 1)
    with pytest.raises(TwinError, match="did not respond"):
        await refuse_twin(bus, SUBJECTS, 1)


async def test_bus_lost_during_the_ping_is_no_twin(bus, nats_server):
    pings = await listen_for_pings(bus, SUBJECTS, 1)
    asking = asyncio.create_task(refuse_twin(bus, SUBJECTS, 1))
    await pings.next_msg()
    nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await asking

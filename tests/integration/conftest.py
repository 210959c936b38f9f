"""Every test here starts real processes."""

from pathlib import Path

import pytest

from support.fleets.event_plane import EventPlane
from support.processes.processes import Fleet

LEFT_OPEN_BY_THE_CLIENT = (
    "ignore:Exception ignored in.*(Writer|ransport|socket):pytest.PytestUnraisableExceptionWarning"
)
"""NATS's client drops a connection that fails at its start without closing it."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
        if "plane" in item.fixturenames:
            item.add_marker(pytest.mark.filterwarnings(LEFT_OPEN_BY_THE_CLIENT))


@pytest.fixture
async def fleet(tmp_path, nats_server):
    fleet = Fleet(tmp_path, nats_server.url)
    yield fleet
    await fleet.close()


@pytest.fixture
async def plane(tmp_path, nats_server):
    plane = EventPlane(tmp_path, nats_server)
    yield plane
    await plane.close()


@pytest.fixture
async def busy(plane):
    """One router and three ranks, which are right."""
    await plane.router()
    await plane.edge(1, dp_size=2)
    await plane.edge(2)
    await plane.until_right()
    return plane

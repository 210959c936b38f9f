"""Every test here starts real processes."""

from pathlib import Path

import pytest

from processes import Fleet


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture
async def fleet(tmp_path, nats_server):
    fleet = Fleet(tmp_path, nats_server.url)
    yield fleet
    await fleet.close()

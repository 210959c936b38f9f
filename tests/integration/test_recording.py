"""A recorded router among real agents: what it decided is decided again, to the last bit."""

from random import Random

import pytest

from processes import Fleet
from router.cli import main
from servers import equals, eventually

RNG = Random(9)
SHARED = [RNG.randrange(200) for _ in range(64)]


@pytest.fixture
def recording(tmp_path):
    return tmp_path / "recording.jsonl"


@pytest.fixture
async def fleet(nats_server, tmp_path, recording):
    options = {"output": recording, "router-temperature": 0.3}
    fleet = Fleet(tmp_path, nats_server.url, "record", **options)
    yield fleet
    await fleet.close()


async def place_some(fleet, requests):
    for number in range(requests):
        own = [RNG.randrange(200) for _ in range(16 * (number % 5))]
        await fleet.ask(SHARED[: 16 * (number % 4)] + own or [1], others_running=3)


def replayed(capsys, *arguments):
    """Exit status, and what was printed."""
    status = main(["replay", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


async def test_decisions_of_a_router_under_traffic_are_decided_again(fleet, recording, capsys):
    await fleet.start(workers=2, dp_size=2, **{"num-blocks": 48, "max-model-len": 512})
    await place_some(fleet, 60)
    await fleet.select(SHARED, "/potential_loads")
    fleet.workers[1].kill()
    await eventually(lambda: equals(fleet.worker_ids(), [2]), timeout_s=20)
    await place_some(fleet, 10)
    assert fleet.router.stop() == 0
    status, printed, _ = replayed(capsys, recording)
    assert "decisions: 70 of 70 equal" in printed
    assert "the recording was ended: stopped" in printed
    assert status == 0
    status, printed, _ = replayed(capsys, recording, "--router-temperature", "0")
    assert "of 70 to another rank" in printed
    assert status == 0

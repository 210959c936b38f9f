"""A recorded router among real agents: what it decided is decided again, to the last bit."""

import asyncio
import re
from random import Random

import pytest

from router.cli import main
from router.errors import ConfigError
from router.protocol.requests import SelectRequest
from router.protocol.values import Tier
from router.runtime.process.settings import configured
from router.sequence.active.prompt import prepare
from router.tools.recordings.record import RecordConfig, RecordedRouter
from support.fleets.direct import DirectEngine, DirectRouter
from support.processes.processes import Fleet
from support.processes.running import RunningRouter, RunningService
from support.processes.servers import equals, eventually, free_port
from support.values.builders import IDENTITY, rank

RNG = Random(9)
SHARED = [RNG.randrange(200) for _ in range(64)]
SMALL = {"num-blocks": 48, "max-model-len": 512}


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
    return status, printed.out


async def test_recorded_decisions_under_traffic_replay_equal(fleet, recording, capsys):
    await fleet.start(workers=2, dp_size=2, **SMALL)
    await place_some(fleet, 60)
    await fleet.client.post(f"{fleet.url}/potential_loads", json={"token_ids": SHARED})
    fleet.workers[1].kill()
    await eventually(lambda: equals(fleet.worker_ids(), [2]))
    await place_some(fleet, 10)
    metrics = (await fleet.client.get(f"{fleet.url}/metrics")).text
    assert re.search(r"^kv_router_recorded_total [1-9]", metrics, re.MULTILINE)
    assert re.search(r"^kv_router_recording_missing_total 0", metrics, re.MULTILINE)
    assert fleet.router.stop() == 0
    status, printed = replayed(capsys, recording)
    assert "decisions: 70 of 70 equal" in printed
    assert "the recording was ended: stopped" in printed
    assert status == 0
    status, printed = replayed(capsys, recording, "--router-temperature", "0")
    assert "of 70 of another rank" in printed
    assert status == 0


async def test_recording_of_a_killed_router_replays(fleet, recording, capsys):
    await fleet.start(workers=1, **SMALL)
    await place_some(fleet, 20)
    await eventually(lambda: recording.read_bytes().count(b'"kind":"submit"') == 20)
    fleet.router.kill()
    status, printed = replayed(capsys, recording)
    assert "decisions: 20 of 20 equal" in printed
    assert "ended" not in printed
    assert status == 0


async def test_recording_from_a_snapshot_beside_another_router_replays(
    nats_server, recording, capsys
):
    port, prompt = free_port(), [RNG.randrange(200) for _ in range(40_000)]
    async with RunningRouter(nats_server.url, snapshot_threshold=3).running() as router:
        worker = await router.worker(1)
        journal = worker.journals[rank(1)]
        for blocks in (9000, 9500, 10_000):
            hashes = (
                prepare(SelectRequest(token_ids=prompt), ())
                .hashed(IDENTITY)
                .sequence_hashes.tolist()
            )
            journal.stored(Tier.DEVICE, hashes[:blocks], None)
            await worker.deliver()
        written = "kv_router_snapshots_written_total"
        await eventually(lambda: router.metric(written))
        config = configured(RecordConfig,
            nats_url=nats_server.url, namespace="test", name="beside", http_port=port,
            drain_s=0.0, output=str(recording), snapshot_threshold=3,
        )  # fmt: skip
        async with RunningService(RecordedRouter(config), port).running() as recorded:
            await eventually(recorded.is_ready)
            placed = await recorded.post("/select", {"token_ids": prompt[:8000]})
            assert placed.json()["overlap_blocks"] == 2000
        assert await router.is_ready()
    kinds = recording.read_bytes().count
    assert kinds(b'"kind":"resume"') == 1
    assert kinds(b'"kind":"apply_slice"') > 1
    status, printed = replayed(capsys, recording)
    assert "decisions: 1 of 1 equal" in printed
    assert "the recording was ended: stopped" in printed
    assert status == 0


async def test_a_port_that_is_taken_leaves_no_file(nats_server, recording):
    async with RunningRouter(nats_server.url).running() as router:
        taken = router.config.http.http_port
        config = configured(
            RecordConfig, nats_url=nats_server.url, http_port=taken, output=str(recording)
        )
        with pytest.raises(ConfigError, match="http_port"):
            await RecordedRouter(config).run(asyncio.Event())
    assert not recording.exists()


async def test_recording_ends_after_its_configured_seconds(recording):
    limited = configured(
        RecordConfig, http_port=free_port(), output=str(recording), seconds=0.1, drain_s=0.0
    )
    router = RecordedRouter(limited)
    await router.run(asyncio.Event())
    assert b'"seconds"' in recording.read_bytes()
    assert "no caller asks this router" in router.outcome


class DirectRecorded(DirectRouter):
    """Without a bus, and recorded."""

    def __init__(self, recording, **fields):
        port = free_port()
        settings = {"namespace": "test", "drain_s": 0.0, "name": "r", **fields}
        self.config = configured(RecordConfig, http_port=port, output=str(recording), **settings)
        RunningService.__init__(self, RecordedRouter(self.config), port)


@pytest.mark.parametrize("shadow", [False, True])
async def test_recording_of_a_direct_router_replays_equal(recording, capsys, shadow):
    prompt = [RNG.randrange(200) for _ in range(64)]
    with DirectEngine(1) as first, DirectEngine(2, ranks=2) as second:
        async with DirectRecorded(recording, router_temperature=0.5, shadow=shadow).running() as r:
            for engine in (first, second):
                await r.register(engine)
            await r.until_exact(1, 2)
            first.cache(prompt)
            second.cache(prompt[:32], dp_rank=1)
            held = {(1, 0): 16, (2, 0): 0, (2, 1): 8}
            await eventually(lambda: equals(r.overlaps(prompt), held))
            for number in range(20):
                body = {"token_ids": prompt[: 8 * (number % 9)] or [1], "request_id": f"r{number}"}
                if shadow:
                    body["incumbent"] = {"worker_id": 1 + number % 2, "dp_rank": 0}
                assert (await r.post("/select_and_reserve", body)).status_code == 200
            await r.client.delete("/workers/2")
            assert (await r.post("/select", {"token_ids": prompt})).json()["worker_id"] == 1
    status, printed = replayed(capsys, recording)
    kinds = recording.read_bytes().count
    asked = (b'"kind":"select"', b'"kind":"submit"', b'"kind":"reserve"')
    count = sum(map(kinds, asked))
    assert count >= 21
    assert f"decisions: {count} of {count} equal" in printed
    assert status == 0


async def ask(router, count):
    for number in range(count):
        prompt = [RNG.randrange(200) for _ in range(8 + number)]
        body = {"token_ids": prompt, "request_id": f"{prompt}"}
        assert (await router.post("/select_and_reserve", body)).status_code == 200


async def test_serve_records_from_its_start_to_the_last_bit(recording, capsys):
    settings = {"record_to": str(recording), "router_temperature": 0.5}
    with DirectEngine(1) as engine, DirectEngine(2, ranks=2) as other:
        async with DirectRouter(**settings).running() as router:
            for each in (engine, other):
                await router.register(each)
            await router.until_exact(1, 2)
            await ask(router, 20)
            state = (await router.client.get("/recording")).json()
            assert (state["recording"], state["is_midway"], state["missing"]) == (True, False, 0)
            assert (state["file"], state["decisions"]) == (str(recording), 20)
    status, printed = replayed(capsys, recording)
    assert "decisions: 20 of 20 equal" in printed
    assert status == 0


async def test_recording_of_a_running_router_can_be_simulated_at_once(tmp_path, capsys):
    with DirectEngine(1) as engine:
        async with DirectRouter(data_dir=str(tmp_path)).running() as router:
            await router.register(engine)
            await router.until_exact(1)
            await ask(router, 3)
            assert not (await router.client.get("/recording")).json()["recording"]
            for _ in range(2):  # once or again, it records
                state = (await router.post("/recording", {"recording": True})).json()
                assert (state["recording"], state["is_midway"]) == (True, True)
            await ask(router, 5)
            state = (await router.post("/recording", {"recording": False})).json()
            assert (state["recording"], state["decisions"], state["waiting_bytes"]) == (False, 5, 0)
            await ask(router, 1)
            assert await router.metric("kv_router_recording") == 0
            refused = await router.post("/recording", {"recording": "yes"})
            assert refused.status_code == 422
    file = state["file"]
    assert main(["simulate", file, "--policies", "recorded"]) == 0
    assert "5 requests" in capsys.readouterr().out
    status, printed = replayed(capsys, file)
    assert "it began in a running router, whose state before is not in it" in printed
    assert "5 decisions after it are not compared" in printed
    assert status == 0


async def test_router_without_a_file_to_record_to_says_so():
    async with DirectRouter().running() as router:
        refused = await router.post("/recording", {"recording": True})
    assert refused.status_code == 409
    assert "record_to or data_dir" in refused.json()["error"]

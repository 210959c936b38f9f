"""What is kept for the next start, and files that can not be used."""

import json

import pytest

from router.errors import ConfigError
from router.ingest.data_dir import DataDir, Kept
from router.protocol.values import Rank
from router.protocol.workers import WorkerRegistration
from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.processes.servers import equals
from support.values.indexing import RunningIndex

KEPT = Kept(
    [WorkerRegistration(worker_id=7, block_size=16, kv_events_endpoints={0: "tcp://e:1"})],
    {7: "cordoned"},
)


@pytest.fixture
def data_dir(tmp_path):
    data_dir = DataDir(tmp_path / "kept")
    with data_dir.ours():
        yield data_dir


@pytest.fixture
def workers_file(tmp_path, data_dir):
    data_dir.save(KEPT)
    return tmp_path / "kept" / "workers.json"


def test_saved_state_is_loaded(data_dir):
    assert data_dir.load() == Kept()
    data_dir.save(KEPT)
    assert data_dir.load() == KEPT
    data_dir.save(Kept())
    assert data_dir.load() == Kept()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[: len(content) // 2], "truncated"),
        (lambda content: content.replace(b"tcp://e:1", b"tcp://e:2"), "its checksum differs"),
        (lambda content: content.replace(b'"version":1', b'"version":2'), "version 2 (allowed: 1)"),
        (lambda _: b"", "truncated"),
        (lambda _: b"\xff\xfe", ""),
        (lambda _: b"[]", "Expected `object`"),
    ],
)
def test_damaged_file_is_logged_and_kept_aside(data_dir, workers_file, caplog, damage, reason):
    damaged = damage(workers_file.read_bytes())
    workers_file.write_bytes(damaged)
    assert data_dir.load() == Kept()
    assert reason in caplog.text
    assert not workers_file.exists()
    (aside,) = workers_file.parent.glob("workers.json.damaged-*")
    assert aside.read_bytes() == damaged
    assert aside.name in caplog.text
    data_dir.save(KEPT)
    assert data_dir.load() == KEPT


def test_one_process_uses_a_folder(tmp_path, data_dir):
    with pytest.raises(ConfigError) as refused, DataDir(tmp_path / "kept").ours():
        pass
    assert (refused.value.key, refused.value.allowed) == (
        "data_dir",
        "a separate folder for each process",
    )


def test_a_folder_must_be_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="can be written"),
        DataDir(tmp_path / "file" / "x").ours(),
    ):
        pass


def test_the_states_of_engines_have_files_of_their_own(data_dir):
    path = data_dir.state_path(Rank(7, 1))
    path.write_bytes(b"x")
    assert data_dir.state_path(Rank(7, 10)) != path
    data_dir.drop_state(Rank(7, 1))
    data_dir.drop_state(Rank(7, 1))
    assert not path.exists()


# ── In a process ─────────────────────────────────────────────────────────────────────────────────


async def test_a_restarted_router_has_its_workers_and_orders_back(tmp_path, eventually):
    engine, kept = DirectEngine(1, ranks=2), {"data_dir": str(tmp_path)}
    with engine:
        async with DirectRouter(**kept).running() as router:
            await router.register(engine)
            await router.post("/workers", {"worker_id": 9})
            await router.post("/workers", engine.body(worker_id=2, routing_group="other"))
            await router.client.patch("/workers/2", json={"lifecycle": "cordoned"})
            await router.client.delete("/workers/2")
            await router.client.patch("/workers/1", json={"lifecycle": "draining"})
            await router.until_exact(1)
        engine.cache(range(40), dp_rank=1)
        async with DirectRouter(**kept).running() as router:
            workers = (await router.client.get("/workers")).json()
            assert {w["worker_id"]: w["lifecycle"] for w in workers} == {
                1: "drained", 9: "incomplete",
            }  # fmt: skip
            await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 0, (1, 1): 10}))


async def test_a_restarted_router_is_ready_once_it_has_caught_up(tmp_path, eventually):
    engine, kept = DirectEngine(1), {"data_dir": str(tmp_path)}
    with engine:
        engine.cache(range(40))
        async with DirectRouter(**kept).running() as router:
            await router.register(engine)
            await router.until_exact(1)
        async with DirectRouter(**kept).running() as router:
            await eventually(router.is_ready)
            assert await router.overlaps(range(40)) == {(1, 0): 10}
    async with DirectRouter(**kept).running() as router:
        assert await is_catching_up(router)
        # Whether it is ready then, or has just noted that the engine is gone, is left to chance.
        await eventually(lambda: equals(is_catching_up(router), False))


async def is_catching_up(router):
    reason = (await router.client.get("/ready")).json()["reason"]
    return reason == "the index has not caught up with the engines registered before"


async def test_a_removed_worker_is_gone_after_a_restart_too(tmp_path):
    engine, kept = DirectEngine(1), {"data_dir": str(tmp_path)}
    async with direct_router(engine, **kept) as router:
        state = tmp_path / "engines" / "1.0.state"
        assert (await router.client.delete("/workers/1")).status_code == 200
        assert not state.exists()
    assert not state.exists()
    async with DirectRouter(**kept).running() as router:
        assert (await router.client.get("/workers")).json() == []


async def test_an_engine_that_is_gone_shows_what_it_held_and_why_that_is_old(tmp_path):
    engine, kept = DirectEngine(1), {"data_dir": str(tmp_path)}
    with engine:
        engine.cache(range(40))
        async with DirectRouter(**kept).running() as router:
            await router.register(engine)
            await router.until_exact(1)
    async with DirectRouter(**kept).running() as router:
        assert await router.overlaps(range(40)) == {(1, 0): 10}
        (rank,) = (await router.view(1))["ranks"]
        assert (rank["trust"]["state"], rank["engine"]["condition"]) == ("lagging", "connecting")


async def test_a_damaged_file_does_not_keep_a_router_from_starting(tmp_path, caplog):
    (tmp_path / "workers.json").write_text("{")
    async with DirectRouter(data_dir=str(tmp_path)).running() as router:
        assert (await router.client.get("/workers")).json() == []
        assert (await router.post("/workers", {"worker_id": 9})).status_code == 201
    assert "cannot be used" in caplog.text
    assert json.loads((tmp_path / "workers.json").read_text())["kept"]["workers"]


async def test_a_damaged_state_of_an_engine_is_kept_aside_and_learned_anew(tmp_path, eventually):
    engine, kept = DirectEngine(1), {"data_dir": str(tmp_path)}
    state = tmp_path / "engines" / "1.0.state"
    with engine:
        engine.cache(range(40))
        async with DirectRouter(**kept).running() as router:
            await router.register(engine)
            await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
        damaged = state.read_bytes()[:-1]
        state.write_bytes(damaged)
        async with DirectRouter(**kept).running() as router:
            await eventually(lambda: equals(router.overlaps(range(40)), {(1, 0): 10}))
            await router.until_exact(1)
        assert state.with_name("1.0.state.damaged").read_bytes() == damaged
        assert state.exists()


async def test_unwritable_state_is_reported(tmp_path):
    async with DirectRouter(data_dir=str(tmp_path)).running() as router:
        (tmp_path / "workers.json.new").mkdir()
        answer = await router.post("/workers", {"worker_id": 9})
        assert (answer.status_code, answer.json()["code"]) == (500, "data_dir")
        assert await router.view(9)
        (tmp_path / "workers.json.new").rmdir()
        assert (await router.post("/workers", {"worker_id": 9})).status_code == 201


async def test_an_index_alone_has_its_instances_back(tmp_path, eventually):
    engine = DirectEngine(1, ranks=2, block_size=16)
    with engine:
        engine.cache(range(32), dp_rank=1)
        async with RunningIndex("", data_dir=str(tmp_path)).running() as index:
            sockets = {"endpoint": engine.endpoint(1), "replay_endpoint": engine.replay_endpoint(1)}
            await index.register(1, dp_rank=1, **sockets)
            await eventually(lambda: equals(index.scores(range(32)), {"1": {"1": 32}}))
        async with RunningIndex("", data_dir=str(tmp_path)).running() as index:
            await eventually(lambda: equals(index.scores(range(32)), {"1": {"1": 32}}))
            assert (await index.instance(1))["endpoints"] == {"1": engine.endpoint(1)}

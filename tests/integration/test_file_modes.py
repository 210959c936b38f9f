"""What processes write under umask 0, which hides nothing: only this user can read it."""

import os
import stat

import httpx
import pytest

from router.runtime.process.settings import AGENT_PREFIX
from support.processes.processes import Process
from support.processes.servers import eventually, free_port
from support.processes.up_command import SMALL_MODEL, ups

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def no_umask():
    former = os.umask(0)
    yield
    os.umask(former)


def open_to_others(folder):
    """Paths in a folder that other users can use in any way, as far as their modes go."""
    return {
        str(path): oct(path.lstat().st_mode)
        for path in folder.rglob("*")
        if path.lstat().st_mode & 0o077
    }


def names(folder, kind=stat.S_ISREG):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if kind(p.lstat().st_mode)}


async def test_whatever_the_umask_a_fleet_s_files_are_of_its_user_only(tmp_path, monkeypatch):
    data, shared = tmp_path / "data", tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)  # as /dev/shm
    settings = {**SMALL_MODEL, f"{AGENT_PREFIX}HOST_CACHE_DIR": str(shared)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    options = ("--workers", "1", "--share", "--host-cache-blocks", "8", "--disk-cache-blocks", "8")
    async with ups() as up:
        fleet = await up("--no-demo", *options, "--data-dir", str(data))
        await fleet.until("Ctrl-C stops everything")
        files, sockets = names(data), names(data, stat.S_ISSOCK)
        assert {"lock", "block.key", "worker-1.log", "kv-1-0.blocks"} <= files
        assert sockets == {"kv-1.0.blocks"}
        host = names(shared)
        assert len(host) == 2, host
        assert not {"kv-1-0.host", "kv-1-0.host.journal"} & host
        assert open_to_others(data) == {}
        assert open_to_others(shared) == {}
        assert data.stat().st_mode & 0o777 == 0o700


async def test_whatever_the_umask_a_router_s_files_are_of_its_user_only(tmp_path):
    data, log, port = tmp_path / "data", tmp_path / "decisions" / "log", free_port()
    log.parent.mkdir()
    options = {"http-port": port, "data-dir": data, "decision-log": log, "drain-s": 0}
    router = Process(tmp_path, "router", "router", "serve", is_forked=False, **options)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def is_up():
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.HTTPError:
                    return False

            await eventually(is_up)
            worker = {
                "worker_id": 1,
                "endpoint": "http://w1",
                "block_size": 16,
                "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{free_port()}"},
            }
            answer = await client.post("/workers", json=worker)
            assert answer.status_code == 201, answer.text
            await eventually(lambda: "workers.json" in names(data))
        assert router.stop() == 0
    finally:
        router.end()
    assert {"lock", "workers.json"} <= names(data)
    assert open_to_others(data) == {}
    assert open_to_others(log.parent) == {}
    assert names(log.parent) == {"log"}

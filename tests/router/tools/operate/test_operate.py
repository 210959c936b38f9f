"""The commands that operate a running router, against a real one."""

import asyncio
import json

import pytest

from router.cli import main
from support.fleets.direct import DirectEngine, DirectRouter, direct_router
from support.processes.servers import free_port


@pytest.fixture
async def router():
    async with direct_router(DirectEngine(5)) as router:
        yield router


@pytest.fixture
def run(router, capsys):
    """A command, asked with a URL without scheme; its status and what it prints."""

    here = str(router.client.base_url).removeprefix("http://")

    async def run(*words, url=here):
        command, *rest = words
        status = await asyncio.to_thread(main, [command, "--url", url, *rest])
        said = capsys.readouterr()
        assert said.err.count("\n") <= 1
        return status, said.out, said.err

    return run


async def test_workers_are_listed_and_shown_in_detail(run):
    status, text, _ = await run("workers")
    assert status == 0
    assert text.splitlines()[1].split()[0] == "5"
    assert (await run("workers", "5"))[1].startswith("worker 5: schedulable")
    assert json.loads((await run("workers", "5", "--json"))[1])["worker_id"] == 5
    assert [each["worker_id"] for each in json.loads((await run("workers", "--json"))[1])] == [5]


async def test_worker_is_cordoned_drained_and_serves_again(run, router):
    await router.post("/select_and_reserve", {"token_ids": [1] * 8, "request_id": "r"})
    assert (await run("cordon", "5"))[:2] == (0, "worker 5 is cordoned: cordoned by an operator\n")
    status, text, _ = await run("drain", "5", "--wait-s", "0.05")
    assert (status, text) == (1, "worker 5 is draining: 1 requests in flight\n")
    await router.client.delete("/reservations/r")
    status, text, _ = await run("drain", "5", "--wait-s", "60")
    assert (status, text) == (0, "worker 5 is drained: 0 requests in flight\n")
    assert (await run("uncordon", "5"))[:2] == (0, "worker 5 is schedulable\n")


async def test_worker_is_registered_from_its_json_and_removed(run, tmp_path):
    file = tmp_path / "worker.json"
    file.write_text('{"worker_id": 6}')
    for given in ('{"worker_id": 6}', str(file)):
        status, text, _ = await run("register", given)
        assert (status, text.startswith("worker 6 is incomplete: ")) == (0, True)
    assert (await run("unregister", "6"))[1] == "worker 6 is removed\n"
    assert (await run("register", str(tmp_path / "none")))[0] == 2
    status, _, error = await run("register", '{"worker_id": "six"}')
    assert (status, "worker_id" in error) == (1, True)


async def test_settings_in_force_are_shown(run):
    assert (await run("config", "max-wait-s"))[1] == "max_wait_s = 60.0  # default\n"
    policy = json.loads((await run("config", "policy", "--json"))[1])["policy"]
    assert policy == {"value": "dynamo-1.0", "source": "set"}
    assert "max_wait_s" not in (await run("config", "--changed"))[1]
    status, _, error = await run("config", "max-wait")
    assert (status, "allowed: max_wait_s" in error) == (2, True)


async def test_top_shows_totals_and_the_worst_first(run, router):
    await router.post("/workers", {"worker_id": 6})
    status, text, _ = await run("top")
    first, _, _, *rows = text.splitlines()
    assert status == 0
    assert "2 workers, 1 schedulable; 0 requests booked, 0 waiting" in first
    assert [row.split()[0] for row in rows] == ["6", "5"]
    assert json.loads((await run("top", "--json"))[1]).keys() == {"workers", "loads"}


async def test_refusal_and_missing_router_are_one_sentence(run):
    status, _, error = await run("drain", "7")
    assert (status, "worker 7 not found" in error) == (1, True)
    status, _, error = await run("workers", url=f"localhost:{free_port()}")
    assert (status, "no router there" in error) == (1, True)


async def test_token_comes_from_the_clients_settings(tmp_path, capsys, monkeypatch):
    tokens, token = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text('[[tokens]]\nname = "o"\ntoken = "a-token-of-o-1234"\nscopes = ["admin"]\n')
    token.write_text("a-token-of-o-1234\n")
    async with DirectRouter(token_file=str(tokens)).running() as router:
        monkeypatch.setenv("KV_ROUTER_CLIENT_URL", str(router.client.base_url))
        assert await asyncio.to_thread(main, ["workers"]) == 1
        assert "authorization" in capsys.readouterr().err
        monkeypatch.setenv("KV_ROUTER_CLIENT_TOKEN_FILE", str(token))
        assert await asyncio.to_thread(main, ["workers"]) == 0
        assert capsys.readouterr().out == "no workers\n"

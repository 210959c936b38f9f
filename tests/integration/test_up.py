"""`kv-router up`, as a user starts it."""

import os
import re
import signal
import socket

import httpx
import pytest
from openai import AsyncOpenAI

from support.engines.vllm_command import install_vllm
from support.processes.servers import eventually, free_port, is_alive
from support.processes.up_command import SMALL_MODEL, ups


@pytest.fixture
async def up():
    async with ups() as start:
        yield start


def alive(pids):
    return [pid for pid in pids if is_alive(pid)]


def figures(output, name):
    """The two figures of a line of the comparison: by the router, and round-robin."""
    line = next(line for line in output.splitlines() if line.startswith(name))
    return [int(number) for number in re.findall(r"(\d+)(?: ms| \()", line)]


async def test_the_demonstration_shows_what_placement_does(up, monkeypatch):
    for setting, value in SMALL_MODEL.items():
        monkeypatch.setenv(setting, value)
    fleet = await up("--no-stay", "--workers", "2", "--share")
    assert await fleet.wait() == 0, fleet.output
    assert set(fleet.pids()) == {"nats", "router", "worker-1", "worker-2"}
    routed, round_robin = figures(fleet.output, "cached prompt tokens")
    assert routed > round_robin
    routed_ms, round_robin_ms = figures(fleet.output, "TTFT, mean")
    assert routed_ms > 0
    assert round_robin_ms > 0
    right = int(re.search(r"^(\d+) of 54 predictions equal", fleet.output, re.MULTILINE)[1])
    assert right > 54 / 2  # on a busy machine events of computed blocks arrive late
    assert re.search(r"^Why \d/0 for a prompt of \d+ tokens\?", fleet.output, re.MULTILINE)
    forced = re.search(r"(\d+) were cached, and (\d+) with the blocks of ", fleet.output)
    assert int(forced[1]) == 0 < int(forced[2])
    assert not alive(fleet.pids().values())


@pytest.mark.long
async def test_prompts_are_handed_over_from_pool_to_pool(up, monkeypatch):
    for setting, value in SMALL_MODEL.items():
        monkeypatch.setenv(setting, value)
    fleet = await up("--no-stay", "--disaggregated", "2:1")
    assert await fleet.wait() == 0, fleet.output
    assert set(fleet.pids()) == {"nats", "router", "worker-1", "worker-2", "worker-3"}
    said = re.search(
        r"^Of (\d+) tokens of (\d+) prompts (\d+) were handed over", fleet.output, re.M
    )
    tokens, prompts, given = map(int, said.groups())
    assert given > 0.9 * tokens
    right = int(re.search(rf"^(\d+) of {prompts} predictions equal", fleet.output, re.M)[1])
    assert right > prompts / 2  # on a busy machine events of computed blocks arrive late


@pytest.mark.long
async def test_up_restarts_dead_processes_and_stops_on_ctrl_c(up, tmp_path):
    options = ("--no-demo", "--workers", "2", "--dp-size", "2", "--data-dir", str(tmp_path))
    fleet = await up(*options)
    await fleet.until("Ctrl-C stops everything")
    pids = fleet.pids()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{fleet.port}") as client:
        workers = (await client.get("/workers")).json()
        assert [(w["worker_id"], w["data_parallel_size"]) for w in workers] == [(1, 2), (2, 2)]
        os.kill(pids["worker-1"], signal.SIGKILL)
        os.kill(pids["router"], signal.SIGKILL)
        await fleet.until("! worker-1 was killed by SIGKILL")
        await fleet.until("! router was killed by SIGKILL")
        await eventually(lambda: _is_ready(client, 2))
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{fleet.openai_port}/v1", api_key="x") as ai:
        said = [{"role": "user", "content": "Once upon a time"}]
        chat = await ai.chat.completions.create(model="default", messages=said, max_tokens=4)
        assert chat.usage.completion_tokens == 4
    await eventually(lambda: _has_their_tokenizer(fleet))
    assert (tmp_path / "worker-1.log").read_text()
    fleet.process.send_signal(signal.SIGINT)
    assert await fleet.wait() == 0
    assert "stopped" in fleet.output
    assert not alive([pids["nats"], pids["worker-2"]])


async def test_children_do_not_outlive_it(up):
    fleet = await up("--no-demo", "--workers", "1")
    await fleet.until("Ctrl-C stops everything")
    pids = fleet.pids().values()
    fleet.process.kill()
    await eventually(lambda: not alive(pids))


@pytest.mark.parametrize(
    ("option", "value"), [("workers", "0"), ("disaggregated", "2"), ("disaggregated", "0:1")]
)
async def test_a_wrong_option_is_a_clear_error(up, option, value):
    fleet = await up(f"--{option}", value)
    assert await fleet.wait() == 2
    assert f"--{option}: '{value}' (flag)" in fleet.output


async def test_vllm_engines_are_attached_by_url_without_a_bus(up, tmp_path, monkeypatch):
    install_vllm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    fleet = await up("--vllm", str(tmp_path / "qwen"), "--vllm-args", "--seed 1", "--no-demo")
    await fleet.until("Ctrl-C stops everything")
    assert set(fleet.pids()) == {"router", "vllm-1", "vllm-2"}
    assert "(model: qwen)" in fleet.output
    assert len(re.findall(r"vLLM 0.32.0, qwen, .* events with replay", fleet.output)) == 2
    fleet.process.send_signal(signal.SIGINT)
    assert await fleet.wait() == 0
    assert not alive(fleet.pids().values())


async def test_missing_vllm_is_a_clear_error(up, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    fleet = await up("--vllm", "qwen")
    assert await fleet.wait() == 2
    assert "vllm: the command vllm is not found (allowed: `pip install vllm`" in fleet.output


async def test_port_in_use_exits_with_2_and_names_it(up):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        fleet = await up("--no-demo", "--workers", "1", "--port", str(port))
        assert await fleet.wait() == 2
    assert str(port) in fleet.output


async def _has_their_tokenizer(fleet):
    async with httpx.AsyncClient() as client:
        ready = (await client.get(f"http://127.0.0.1:{fleet.openai_port}/ready?verbose")).json()
    standing = ready["tokenizers"]["standing"].get("default", {})
    assert ready["tokenizers"]["problems"] == []
    return set(standing.values()) == {"agrees"}


async def _is_ready(client, workers):
    try:
        answer = await client.get("/ready")
    except httpx.HTTPError:
        return False
    return answer.json()["schedulable_workers"] == workers

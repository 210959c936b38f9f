"""`kv-router doctor`: its command line, exit status and reports."""

import asyncio
import json
import sys

import pytest

from router.cli import main
from router.tools.doctor.config import load_doctor_config
from support.engines.openai_engine import OpenAiEngine
from support.engines.zmq_engines import Engine, stored
from support.processes.servers import free_port

PROMPT = stored([1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lora_name=None)


@pytest.fixture
def engine():
    with Engine(topic="kv@1@m") as engine:
        engine.publish(PROMPT)
        engine.wait()
        yield engine


def run(engine, *arguments):
    endpoints = ["--zmq", engine.endpoint, "--replay", engine.replay_endpoint]
    return main(["doctor", *endpoints, "--seconds", "0.2", *arguments])


def test_a_healthy_engine_ends_with_0_and_how_to_attach_it(engine, capsys):
    assert run(engine, "--topic", "kv@", "--model", "m") == 0
    text = capsys.readouterr().out
    assert "ok        block size: 4 tokens" in text
    assert "1 unknown" in text or "2 unknown" in text
    line = next(line for line in text.splitlines() if "curl" in line)
    body = json.loads(line.partition(" -d ")[2].strip("'"))
    assert (body["block_size"], body["model_name"]) == (4, "m")
    assert body["kv_events_endpoints"] == {"0": engine.endpoint}
    agent = text.splitlines()[-1].split()
    assert agent[:2] == ["kv-worker-agent", "run"]
    assert engine.replay_endpoint in agent


def test_unhealthy_engine_exits_with_1_and_advice(engine, capsys):
    assert run(engine, "--block-size", "16") == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("wrong     block size"))
    assert lines[at + 1].strip().startswith("why: ")
    assert any(line.strip().startswith("fix: register block_size 4") for line in lines[at:])


def test_json_says_the_same(engine, capsys):
    assert run(engine, "--json", "--block-size", "16") == 1
    said = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in said["findings"]}
    assert said["is_well"] is False
    assert by_check["block size"]["verdict"] == "wrong"
    assert by_check["hash type"] == {
        "check": "hash type", "verdict": "ok", "text": "64 bits, unsigned",
    }  # fmt: skip
    assert said["worker"]["replay_endpoints"] == {"0": engine.replay_endpoint}


@pytest.mark.parametrize(
    ("endpoint", "part"),
    [
        ("tcp://*:5557", "a host to connect to"),
        ("localhost:5557", "is no endpoint"),
        ("tcp://localhost:99999", "port 99999"),
        ("tcp://localhost", "is no endpoint"),
    ],
)
def test_a_malformed_endpoint_is_refused_before_anything_is_asked(endpoint, part, capsys):
    assert main(["doctor", "--zmq", endpoint]) == 1
    text = capsys.readouterr().out
    assert "wrong     events endpoint" in text
    assert part in text.replace("\n               ", " ")
    assert main(["doctor", "--zmq", "tcp://h:1", "--replay", endpoint]) == 1
    assert "wrong     replay endpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "zmq: missing"),
        (["--zmq", "tcp://h:1", "--probe"], "probe: needs --url"),
        (["--zmq", "tcp://h:1", "--url", "host"], "url: 'host'"),
        (["--zmq", "tcp://h:1", "--seconds", "0"], "seconds"),
        (["--zmq", "tcp://h:1", "--engine", "llama"], "engine"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments, part, capsys):
    assert main(["doctor", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_unreachable_engine_exits_with_1(capsys):
    assert main(["doctor", "--zmq", f"tcp://127.0.0.1:{free_port()}"]) == 1
    assert "attach" not in capsys.readouterr().out


def test_settings_may_come_from_the_environment():
    config = load_doctor_config([], {"KV_ROUTER_DOCTOR_ZMQ": "tcp://h:1"})
    assert config.zmq == "tcp://h:1"


async def doctor_of(url):
    command = [sys.executable, "-m", "router", "doctor", "--url", url, "--seconds", "0.2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_url_alone_is_asked_for_its_sockets_and_described_as_by_a_router():
    engine = OpenAiEngine()
    async with engine.running():
        engine.engine.publish(PROMPT)
        status, text = await doctor_of(engine.url)
    assert status == 0
    sizes = "1 rank of 1000 blocks of 4 tokens; events with replay"
    assert text.startswith(f"ok        attach: {engine.url}  vLLM 0.32.0, m, {sizes}\n")
    assert f"events endpoint: tcp://127.0.0.1:{engine.engine.port}" in text


async def test_url_without_sockets_ends_with_how_to_get_them():
    async with OpenAiEngine(sources={}).running() as engine:
        status, text = await doctor_of(engine.url)
    assert status == 0
    assert "warning   attach" in text
    assert "no KV events: restart it with" in text


async def test_url_where_nothing_listens_is_wrong():
    status, text = await doctor_of(f"http://127.0.0.1:{free_port()}")
    assert status == 1
    assert "not up yet: nothing listens there" in text
    assert "retrying" not in text

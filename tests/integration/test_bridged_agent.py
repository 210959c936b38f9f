"""The agent beside an engine as a process of its own: killed, restarted, given invalid options."""

import subprocess
import sys

import httpx
import pytest

from support.engines.engines import names
from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.engines.zmq_engines import Engine, removed, stored
from support.processes.processes import Process
from support.processes.running import RunningRouter
from support.processes.servers import NO_TLS, equals, eventually, free_port

STATE_BATCHES = 2_000


class BridgeProcess:
    """`kv-worker-agent run` beside an engine, and what it holds to be true."""

    def __init__(self, directory, nats_url, engine, metrics, **options):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process(
            directory, "bridge", "worker_agent", "run",
            **{"engine": "vllm", "namespace": "test", "worker-id": 7, "http-port": port,
               "nats-url": nats_url, "endpoint": "http://engine:8000", "zmq": engine.endpoint,
               "replay": engine.replay_endpoint, "topic": "kv@", "metrics-url": metrics.url,
               "state-dir": directory / "state", **options},
        )  # fmt: skip

    async def held(self):
        async with httpx.AsyncClient(verify=NO_TLS) as client:
            try:
                dump = (await client.get(f"{self.url}/dump")).json()
            except httpx.HTTPError:
                return None
        return set(dump["ranks"].get("0", {"device": ()})["device"])

    async def holds(self, expected):
        return await self.held() == expected


@pytest.fixture
def metrics():
    with MetricsServer(vllm_metrics(num_gpu_blocks=5_000)) as metrics:
        yield metrics


@pytest.fixture
def engine():
    """Its buffer does not reach back to the beginning of what the test publishes."""
    with Engine(topic="kv@w1", buffer_steps=600) as engine:
        yield engine


def block(n):
    return names([n % 500, n // 500] * 2)[0]


def publish(engine, first, last):
    for n in range(first, last):
        engine.publish(stored([10_000 + n], [n % 500, n // 500] * 2))


async def is_right(router, expected):
    view = await router.view(7)
    if view is None or view["ranks"][0]["trust"]["state"] != "exact":
        return False
    dump = (await router.client.get("/dump")).json()
    events = [event for scope in dump.values() for event in scope["events"]]
    held = {b["block_hash"] for e in events for b in e["event"]["data"]["stored"]["blocks"]}
    return held == expected


async def test_a_killed_agent_goes_on_where_it_stopped(tmp_path, nats_server, engine, metrics):
    bridge = BridgeProcess(tmp_path, nats_server.url, engine, metrics)
    try:
        async with RunningRouter(nats_server.url, worker_silence_s=2.5).running() as router:
            # An engine is followed from its first batch on, or what came before is doubted.
            await eventually(lambda: is_right(router, set()))
            publish(engine, 0, STATE_BATCHES + 200)
            expected = {block(n) for n in range(STATE_BATCHES + 200)}
            await eventually(lambda: is_right(router, expected))
            bridge.process.kill()
            await eventually(lambda: _trusts(router, "blind"))
            engine.publish(removed([10_000]))
            publish(engine, STATE_BATCHES + 200, STATE_BATCHES + 300)
            expected |= {block(n) for n in range(STATE_BATCHES + 300)}
            expected.discard(block(0))
            bridge.process.start()
            await eventually(lambda: is_right(router, expected))
            assert bridge.process.stop() == 0
            await eventually(lambda: equals(router.view(7), None))
            publish(engine, STATE_BATCHES + 300, STATE_BATCHES + 310)
            expected |= {block(n) for n in range(STATE_BATCHES + 300, STATE_BATCHES + 310)}
            bridge.process.start()
            await eventually(lambda: is_right(router, expected))
    finally:
        bridge.process.end()


async def _trusts(router, state):
    view = await router.view(7)
    return view["ranks"][0]["trust"]["state"] == state and not view["not_schedulable_reasons"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "vllm"], "endpoint: missing"),
        (
            ["--engine", "tgi"],
            "engine: 'tgi' is unknown (allowed: reference, vllm, sglang, trtllm)",
        ),
        pytest.param(
            ["--zmq", "tcp://e:1"],
            "--zmq: given here (flag) (allowed: only next to an engine",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--engine", "vllm", "--num-layers", "2"],
            "only with --engine reference",
            marks=pytest.mark.long,
        ),
    ],
)
def test_invalid_options_are_named(flags, words):
    command = [sys.executable, "-m", "worker_agent", "run", *flags]
    ran = subprocess.run(command, capture_output=True, check=False)
    assert (ran.returncode, words in ran.stderr.decode()) == (2, True)
    assert b"Traceback" not in ran.stderr


def test_a_wrong_size_is_named(tmp_path, nats_server, engine, metrics):
    bridge = BridgeProcess(tmp_path, nats_server.url, engine, metrics, **{"block-size": 16})
    assert bridge.process.popen.wait(timeout=60) == 2
    assert "--block-size: 16 was set, but the engine reports 4" in bridge.process.log.read_text()
    assert "Traceback" not in bridge.process.log.read_text()

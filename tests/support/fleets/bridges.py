"""Agents beside engines that are not ours, for tests."""

from contextlib import asynccontextmanager, closing

from router.runtime.process.settings import configured
from support.blocks.vllm_halves import Halves, Request
from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.engines.zmq_engines import Engine
from support.processes.running import RunningService
from support.processes.servers import eventually, free_port, until
from worker_agent.bridge.agent import BridgeAgent
from worker_agent.config.bridge import BridgeConfig
from worker_agent.connector.vllm_parts.settings import connector_settings


class RunningBridge(RunningService):
    """An agent beside an engine, and a client of its probes."""

    def __init__(self, nats_url, beside, metrics, **fields):
        port = free_port()
        defaults = {
            "engine": "vllm", "namespace": "test", "worker_id": 7, "name": "w7", "topic": "kv@",
            "endpoint": "http://engine:8000", "zmq": beside.endpoint,
            "replay": beside.replay_endpoint, "metrics_url": metrics and metrics.url,
            "metrics_interval_s": 0.05, **fields,
        }  # fmt: skip
        config = configured(BridgeConfig, nats_url=nats_url, http_port=port, **defaults)
        super().__init__(BridgeAgent(config), port)

    async def reasons(self):
        answer = await self.client.get("/ready?verbose")
        assert answer.status_code == 503
        return answer.json()["reason"].split("; ")

    async def degraded(self):
        answer = await self.client.get("/ready?verbose")
        assert answer.status_code == 200
        return answer.json()["degraded"]


@asynccontextmanager
async def ready(bridge):
    async with bridge.running():
        await eventually(bridge.is_ready)
        yield bridge


@asynccontextmanager
async def tiered(nats_url, folder, key_file, number, **fields):
    """An agent, and the halves of a connector in its engine, which share blocks."""
    address, control = f"tcp://127.0.0.1:{free_port()}", f"unix://{folder}/control-{number}"
    shared = {"block_key_file": key_file, "share_listen": address, "control_listen": control}
    settings = {"worker_id": number, "host_cache_blocks": 32, "onboard_always": True, **shared}
    with (
        Engine(topic="kv@w") as engine,
        MetricsServer(vllm_metrics()) as metrics,
        closing(Halves(connector_settings(settings))) as halves,
    ):
        halves.started()
        bridge = RunningBridge(
            nats_url, engine, metrics, worker_id=number, name=f"w{number}", **shared, **fields
        )
        async with ready(bridge):
            yield bridge, halves


def looked_up(halves, key):
    """Return how many tokens of the prompt can be loaded, once the peers have answered."""
    halves.scheduler.begin(Request(key, list(range(10))))
    until(lambda: halves.step() and halves.scheduler.matched(key, 0, 0.0))
    return halves.scheduler.matched(key, 0, 0.0).tokens

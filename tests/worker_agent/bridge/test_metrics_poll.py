"""Metrics read over real HTTP, and everything that can go wrong with that."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.processes.servers import eventually
from worker_agent.bridge import metrics_poll
from worker_agent.bridge.metrics_poll import MetricsPoll


class Polling:
    def __init__(self, url, kind="vllm"):
        self.taken = []
        self.times = []
        self.poll = MetricsPoll(kind, url, 0.02, self.take)

    def take(self, metrics, dated_s, took_s):
        self.taken.append(metrics)
        self.times.append((dated_s, took_s))

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.poll.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
def server():
    with MetricsServer(vllm_metrics()) as server:
        yield server


async def test_reads_again_and_again(server):
    async with Polling(server.url).running() as polling:
        await eventually(lambda: polling.poll.readings > 2)
        assert polling.taken[-1].facts().block_size == 4
        server.text = vllm_metrics(block_size=8)
        await eventually(lambda: polling.taken[-1].facts().block_size == 8)
        assert (polling.poll.failures, polling.poll.problem) == (0, None)
        assert polling.times == sorted(polling.times)
        assert all(0 < took_s < 2 for _, took_s in polling.times)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": 404}, "status 404"),
        ({"status": 302}, "status 302"),
        ({"text": "vllm:num_requests_running{engine=0} 1"}, "line 1 is no sample"),
        ({"text": "sglang:num_running_reqs 1"}, "no metric of vllm in it"),
        ({"text": b"\xff\xfe"}, "no metric of vllm"),
        ({"text": "x" * 2_000}, "more than 1000 bytes"),
        ({"hangs": True}, "imeout"),
    ],
)
async def test_unreadable_metrics_are_reported_and_retried(server, change, problem, monkeypatch):
    monkeypatch.setattr(metrics_poll, "LIMIT_BYTES", 1_000)
    monkeypatch.setattr(metrics_poll, "TIMEOUT_S", 0.3)
    before = {name: getattr(server, name) for name in change}
    async with Polling(server.url).running() as polling:
        await eventually(lambda: polling.poll.readings)
        for name, value in change.items():
            setattr(server, name, value)
        await eventually(lambda: problem in (polling.poll.problem or ""))
        assert polling.poll.failures
        for name, value in before.items():
            setattr(server, name, value)
        await eventually(lambda: polling.poll.problem is None)


async def test_an_engine_that_is_not_there_yet(server):
    server.stop()
    async with Polling(server.url).running() as polling:
        await eventually(lambda: polling.poll.failures > 1)
        assert (polling.taken, polling.poll.read_s) == ([], None)
        server.start()
        await eventually(lambda: polling.taken)


async def test_failures_are_logged_once(server, caplog):
    server.status = 500
    async with Polling(server.url).running() as polling:
        await eventually(lambda: polling.poll.failures > 2)
    said = [record.message for record in caplog.records if "status 500" in record.message]
    assert len(said) == 1
    assert server.url in said[0]

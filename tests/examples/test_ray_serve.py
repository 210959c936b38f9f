"""The example for Ray Serve, in an environment that has it, before real engines."""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.fleets.systems import TEXTS, SystemsFleet, check_cached

pytestmark = pytest.mark.systems

EXAMPLE = Path(__file__).parents[2] / "examples/ray_serve.py"
START_S, ANSWER_S = 240, 60
BUSY = """
import asyncio, sys, time, ray
from ray_serve import *

async def outcome(handle, i):
    body = {"model": "default", "prompt": f"Text {i % 5}. " * 8, "max_tokens": 8, "stream": True}
    response = handle.remote(body)
    if i % 7 == 3:
        await asyncio.sleep(0.05 * (i % 4))
        response.cancel()
    return (await response)["is_booked"]

async def outcomes(handle):
    return await asyncio.gather(*(outcome(handle, i) for i in range(90)), return_exceptions=True)

url = sys.argv[1]
workers = asyncio.run(workers_of(url))
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
few = {"num_replicas": 2, "max_ongoing_requests": 4}
engine = Engine.options(**few, request_router_config=config_of(url))
handle = serve.run(engine.bind(url, workers), route_prefix=None)
while not asyncio.run(outcome(handle, 0)):
    time.sleep(0.2)
print(sum(each is True for each in asyncio.run(outcomes(handle))))
"""
"""More requests than the replicas take at once, some of which are cancelled."""


class RayServe:
    """The example as a process: a line is a prompt, and its answer a line."""

    def __init__(self, process):
        self._process = process

    async def line(self, timeout_s):
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        assert line, (await self._process.stderr.read()).decode(errors="replace")
        return line

    async def ask(self, text):
        self._process.stdin.write(text.encode() + b"\n")
        return json.loads(await self.line(ANSWER_S))


async def ray_process(*arguments):
    python = os.environ.get("RAY_PYTHON")
    if python is None:
        pytest.fail("RAY_PYTHON names no Python with Ray; `make test-integrations` does")
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        python, *arguments, stdin=pipe, stdout=pipe, stderr=pipe,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(EXAMPLE.parent)},
    )  # fmt: skip


@asynccontextmanager
async def ray_serve(fleet):
    process = await ray_process(EXAMPLE, "--router", fleet.url)
    example = RayServe(process)
    try:
        assert await example.line(START_S) == b"ready\n"
        yield example
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), ANSWER_S)


async def test_requests_reach_the_replica_that_holds_their_prompt(fleet):
    async with ray_serve(fleet) as example:
        await until_booked(example)
        for worker_id, text in list(TEXTS.items()) * 3:
            answer = await example.ask(text)
            assert answer["is_booked"]
            assert answer["worker_id"] == worker_id
            check_cached(answer["usage"], text)
        await fleet.until_load(0, 0)
        fleet.router.kill()
        for text in list(TEXTS.values()) * 3:
            answer = await example.ask(text)
            assert not answer["is_booked"]
            assert answer["usage"]["completion_tokens"] > 0
        fleet.router.start()
        await until_booked(example)
        await fleet.until_load(0, 0)


@pytest.fixture
async def impatient(tmp_path, nats_server):
    """A fleet whose router lets no request wait for long."""
    options = {"router-queue-threshold": 0.001, "max-wait-s": 0.3}
    fleet = SystemsFleet(tmp_path, nats_server.url, **options)
    try:
        await fleet.begin()
        yield fleet
    finally:
        await fleet.close()


async def test_a_refusal_of_the_router_is_back_pressure_with_its_retry_after(impatient):
    fleet = impatient
    async with ray_serve(fleet) as example:
        await until_booked(example)
        await fleet.until_load(0, 0)
        for worker_id in TEXTS:
            busy = {"worker_id": worker_id, "request_id": f"busy-{worker_id}"}
            body = {**busy, "token_ids": list(range(4000))}
            answer = await fleet.client.post(f"{fleet.url}/reservations", json=body)
            assert answer.status_code == 201, answer.text
        for text in TEXTS.values():
            refusal = await example.ask(text)
            assert refusal["refused"] == 503
            assert refusal["retry_after_s"] >= 1
        for worker_id in TEXTS:
            await fleet.client.delete(f"{fleet.url}/reservations/busy-{worker_id}")
        assert (await example.ask(TEXTS[1]))["is_booked"]
        await fleet.until_load(0, 0)


async def until_booked(example):
    """Replicas name their workers once a second, as often as a silent router is asked again."""
    for _ in range(300):
        answer = await example.ask("A prompt that neither holds.")
        if answer["is_booked"]:
            return
    raise AssertionError("no request was booked")


async def test_bookings_of_refused_and_cancelled_requests_are_freed(fleet):
    process = await ray_process("-c", BUSY, fleet.url)
    placed, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 0, errors.decode(errors="replace")
    assert int(placed) >= 70
    await fleet.until_load(0, 0)

"""200,000 new blocks a second published to a service by another process: by an agent over
JetStream, as deployed; or on an engine's own socket, so that the service does the agent's part.

A pool with room for all of them only grows; one that is full has as many blocks removed.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import httpx
import msgspec
import numpy as np
import uvloop
import zmq
from events_agent import living_agent
from events_processes import free_port
from events_writer import REQUEST_BLOCKS
from service_world import BLOCK_SIZE

PER_S, EVENT_BLOCKS = 200_000, 128
ROOMY, FULL = 1 << 22, 150_000
"""Blocks of a pool that holds all of them, and of one that is full before the count."""

WORKER_IDS = {ROOMY: 98, FULL: 99}

NAMESPACE = "default"
STORE_S, MOST_REQUESTS = 0.005, 512
NICENESS = 10
PATIENCE_S, LEAD_S = 120.0, 1.0
"""Until it publishes, on a busy machine; and how long it has published before the count."""

Sent: TypeAlias = "multiprocessing.sharedctypes.Synchronized[int]"
"""Blocks published so far."""


@contextmanager
def fed_by_engine(url: str, pool_blocks: int) -> Iterator[Callable[[], float]]:
    """Publish blocks of a worker of another group meanwhile. Yields their rate, as a function."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with httpx.Client(base_url=url, timeout=60.0) as client:
        with _process(_tell, endpoint, pool_blocks) as sent:
            registration = _registration(endpoint, pool_blocks)
            client.post("/workers", json=registration).raise_for_status()
            yield _rate(sent)
        client.delete(f"/workers/{WORKER_IDS[pool_blocks]}").raise_for_status()


@contextmanager
def fed_by_agent(nats_url: str, pool_blocks: int) -> Iterator[Callable[[], float]]:
    """The same, over the bus."""
    with _process(_publish, nats_url, pool_blocks) as sent:
        yield _rate(sent)


@contextmanager
def _process(tell: Callable[[str, int, Sent], None], url: str, pool_blocks: int) -> Iterator[Sent]:
    context = multiprocessing.get_context("spawn")
    sent = context.Value("q", 0)
    process = context.Process(target=_behind, args=(tell, url, pool_blocks, sent), daemon=True)
    process.start()
    try:
        yield sent
    finally:
        process.terminate()
        process.join()


def _behind(tell: Callable[[str, int, Sent], None], url: str, pool_blocks: int, sent: Sent) -> None:
    """Run after the generator, which shares the core: its lateness would count as the router's."""
    os.nice(NICENESS)
    tell(url, pool_blocks, sent)


def _rate(sent: Sent) -> Callable[[], float]:
    """Return the blocks a second from now on, once it publishes."""
    until_s = time.monotonic() + PATIENCE_S
    while not sent.value:
        if time.monotonic() > until_s:
            raise TimeoutError("new blocks have no subscriber")
        time.sleep(0.01)
    time.sleep(LEAD_S)
    begun, begun_s = sent.value, time.monotonic()
    return lambda: (sent.value - begun) / (time.monotonic() - begun_s)


def _publish(url: str, pool_blocks: int, sent: Sent) -> None:
    uvloop.run(_publish_forever(url, pool_blocks, sent))


async def _publish_forever(url: str, pool_blocks: int, sent: Sent) -> None:
    async with living_agent(url, NAMESPACE, WORKER_IDS[pool_blocks], pool_blocks) as agent:
        await asyncio.sleep(LEAD_S)
        start_s = time.monotonic()
        while True:
            requests = int((time.monotonic() - start_s) * PER_S - sent.value) // REQUEST_BLOCKS
            agent.store(min(max(requests, 0), MOST_REQUESTS))
            sent.value += min(max(requests, 0), MOST_REQUESTS) * REQUEST_BLOCKS
            await asyncio.sleep(STORE_S)


def _tell(endpoint: str, pool_blocks: int, sent: Sent) -> None:
    tokens = np.random.default_rng(1).integers(0, 100_000, EVENT_BLOCKS * BLOCK_SIZE).tolist()
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.bind(endpoint)
        socket.recv()
        start_s = time.monotonic()
        for number in range(1 << 40):
            names = list(range(number * EVENT_BLOCKS + 1, (number + 1) * EVENT_BLOCKS + 1))
            tokens[0] = number % 100_000  # another prompt each time
            events: list[object] = [["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]]
            if names[0] > pool_blocks:
                gone = [each - pool_blocks for each in names]
                events.append(["BlockRemoved", gone, "GPU"])
            payload = msgspec.msgpack.encode([0.0, events, 0])
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            sent.value += EVENT_BLOCKS
            time.sleep(max(0.0, start_s + sent.value / PER_S - time.monotonic()))


def _registration(endpoint: str, pool_blocks: int) -> dict[str, object]:
    return {
        "worker_id": WORKER_IDS[pool_blocks],
        "model_name": "fed",
        "routing_group": "g",
        "endpoint": "http://fed:8000",
        "block_size": BLOCK_SIZE,
        "total_kv_blocks": 2 * pool_blocks,
        "max_num_batched_tokens": 8_192,
        "kv_events_endpoints": {"0": endpoint},
    }

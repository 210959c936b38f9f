"""The sections of `forward.py` about streams."""

import asyncio
import json
import re
import time
from statistics import median

from forward_servers import MODEL, PATH, Scale, Served, engine, ours
from rows import Row
from timing import Bounded

from router.runtime.http_client import HttpPool, Origin, PoolLimits, Request

STREAMS, PATIENCE_S = 64, 60.0
SENT = re.compile(rb'"text":"(\d+)"')
JSON = ((b"content-type", b"application/json"),)


def stream(scale: Scale) -> list[Row]:
    """Return what is added to a chunk of 64 streams, of a chunk every 20 ms each: from the
    engine's hand to the client's, and our processor time.
    """
    chunks = 50 if scale.is_quick else 500
    with engine(chunks, 0.02) as direct, ours(direct.port) as own:
        asyncio.run(_stream_ms(own.port, STREAMS))  # warm
        without = asyncio.run(_stream_ms(direct.port, STREAMS))
        before_s = own.processor_s
        with_us = asyncio.run(_stream_ms(own.port, STREAMS))
        cpu_ms = 1e3 * (own.processor_s - before_s) / (STREAMS * chunks)
    added_ms = median(with_us) - median(without)
    return [
        Bounded("added to a chunk, p50", added_ms, 1.0, "ms", 1.0, lower=True),
        Bounded("processor time of a chunk", cpu_ms, 1.0, "ms", 1.0, lower=True),
    ]


def _stream_request(number: int) -> Request:
    fields = {"model": MODEL, "prompt": [number, 2, 3], "stream": True}
    return Request("POST", PATH, json.dumps(fields).encode(), JSON)


async def _stream_ms(port: int, streams: int) -> list[float]:
    pool = HttpPool(PoolLimits(max_connections=streams))
    delays: list[float] = []
    origin = Origin.of(f"http://127.0.0.1:{port}")

    async def one(number: int) -> None:
        await asyncio.sleep(0.02 * number / streams)
        async with pool.response(origin, _stream_request(number), PATIENCE_S) as answer:
            async for data in answer.chunks(PATIENCE_S):
                now_ns = time.monotonic_ns()
                sent = [int(each) for each in SENT.findall(data)]
                delays.extend((now_ns - sent_ns) / 1e6 for sent_ns in sent)

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number))
    pool.close()
    return delays


def idle(scale: Scale) -> list[Row]:
    """Return the resident memory of a router with streams that have begun, and say nothing."""
    with engine(2, 3600.0) as direct, ours(direct.port) as own:
        memory_mb = asyncio.run(_idle_mb(own, scale.idle_streams))
    name = f"{scale.idle_streams} idle streams, and a router"
    return [Bounded(name, memory_mb, 300.0, "MB", 300.0, lower=True)]


async def _idle_mb(own: Served, streams: int) -> float:
    pool = HttpPool(PoolLimits(max_connections=streams))
    origin = Origin.of(f"http://127.0.0.1:{own.port}")
    begun, hold = 0, asyncio.Event()

    async def one(number: int) -> None:
        nonlocal begun
        async with pool.response(origin, _stream_request(number), PATIENCE_S) as answer:
            await anext(answer.chunks(PATIENCE_S))
            begun += 1
            await hold.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number))
            if number % 50 == 0:
                await asyncio.sleep(0.02)
        while begun < streams:
            await asyncio.sleep(0.05)
        memory_mb = own.resident_mb
        hold.set()
    pool.close()
    return memory_mb

"""Listens to an SGLang rank's load socket."""

import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from router.publisher.engine_loads import TOPIC, EngineLoads

_HIGH_WATER_MARK = 64
_MAX_MESSAGE_BYTES = 1 << 16
_POLL_MS = 1_000


async def listen_to_loads(
    context: zmq.asyncio.Context,
    endpoint: str,
    loads: EngineLoads,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hear reports until cancelled. A lost one is superseded by the next, so that the socket may
    reconnect by itself.
    """
    socket = context.socket(zmq.SUB)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        while True:
            if await socket.poll(_POLL_MS):
                loads.hear(await socket.recv_multipart(), clock())
    finally:
        socket.close(0)

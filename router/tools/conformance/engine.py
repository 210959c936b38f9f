"""An engine's event publisher over real sockets, as vLLM and SGLang run it.

PUB with batches numbered from 0 in each life, and a ROUTER that replays the batches that it kept.
XPUB is PUB on the wire, and also reports subscriptions, so that a scenario begins when all systems
are subscribed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import zmq
import zmq.asyncio

from router.tools.conformance.steps import EngineSpec

END = (-1).to_bytes(8, "big", signed=True)
BUFFER_STEPS = 10_000
ANY_PORT = "tcp://127.0.0.1:*"
REBIND_S = 5.0

Opened = TypeVar("Opened")


class ZmqEngine:
    """The sockets of one rank."""

    def __init__(self, context: zmq.asyncio.Context, spec: EngineSpec) -> None:
        self._context = context
        self._topic = (b"",) if spec.replays_topic else ()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._sequence = 0
        self._subscribers = 0
        self._replaying: asyncio.Task[None] | None = None
        self._events = self._publisher(ANY_PORT)
        self.endpoint = self._events.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.replay_endpoint: str | None = None
        if spec.has_replay:
            self.replay_endpoint = self._open_replay(ANY_PORT)

    async def publish(self, payload: bytes, arrives: bool = True) -> None:
        """Publish a batch under the next number; one that does not arrive is kept for replay."""
        if arrives:
            await self._events.send_multipart((b"", self._sequence.to_bytes(8, "big"), payload))
        self._kept.append((self._sequence, payload))
        self._sequence += 1

    async def restart(self) -> None:
        """Close all sockets, and begin another life at the same addresses."""
        await self.close()
        self._kept.clear()
        self._sequence = self._subscribers = 0
        self._events = await _retried(lambda: self._publisher(self.endpoint))
        if (endpoint := self.replay_endpoint) is not None:
            await _retried(lambda: self._open_replay(endpoint))

    async def close_replay(self) -> None:
        """Close the replay socket."""
        if self._replaying is not None:
            self._replaying.cancel()
            with suppress(asyncio.CancelledError):
                await self._replaying
            self._replaying = None

    async def close(self) -> None:
        """Close all sockets."""
        await self.close_replay()
        self._events.close(linger=0)

    async def until_subscribed(self, count: int, within_s: float) -> bool:
        """Wait for `count` subscribers; return False if there are fewer after `within_s`."""
        deadline = time.monotonic() + within_s
        while self._subscribers < count:
            left_ms = (deadline - time.monotonic()) * 1_000
            if left_ms <= 0 or not await self._events.poll(int(left_ms) + 1):
                return False
            (message,) = await self._events.recv_multipart()
            self._subscribers += 1 if message[:1] == b"\x01" else -1
        return True

    def _publisher(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.XPUB)
        socket.set(zmq.XPUB_VERBOSER, 1)
        socket.set(zmq.SNDHWM, 100_000)
        return _bound(socket, endpoint)

    def _open_replay(self, endpoint: str) -> str:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 2 * (BUFFER_STEPS + 1))
        _bound(socket, endpoint)
        self._replaying = asyncio.create_task(self._replay(socket))
        return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def _replay(self, socket: zmq.asyncio.Socket) -> None:
        with socket:
            while True:
                client, *_, start = await socket.recv_multipart()
                first = int.from_bytes(start, "big")
                for sequence, payload in [kept for kept in self._kept if kept[0] >= first]:
                    frames = (*self._topic, sequence.to_bytes(8, "big"), payload)
                    await socket.send_multipart((client, b"", *frames))
                await socket.send_multipart((client, b"", *self._topic, END, b""))


def _bound(socket: zmq.asyncio.Socket, endpoint: str) -> zmq.asyncio.Socket:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


async def _retried(bind: Callable[[], Opened]) -> Opened:
    """Bind until the address, which is free only some time after its socket's end, is free."""
    deadline = time.monotonic() + REBIND_S
    while True:
        try:
            return bind()
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.01)

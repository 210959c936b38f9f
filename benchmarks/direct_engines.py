"""Many idle engines in one process: sockets and a history each, and answers to replays."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop
import zmq
from events_engine import HIGH_WATER_MARK, Traffic, payloads

from router.publisher.batch_order.frames import END_OF_REPLAY

FILES_PER_ENGINE = 8
START_S = 60.0


@contextmanager
def running_engines(engines: int, batches: int) -> Iterator[list[tuple[str, str]]]:
    """Yield the endpoints of `engines` engines, for events and for replays."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    serving = context.Process(target=serve, args=(theirs, engines, batches))
    serving.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError("the engines do not start")
        yield ours.recv()
    finally:
        serving.terminate()
        serving.join()


def serve(pipe: Connection, engines: int, batches: int) -> None:
    """Send the endpoints, then answer until terminated."""
    uvloop.run(_serve(pipe, engines, batches))


async def _serve(pipe: Connection, engines: int, batches: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256 + FILES_PER_ENGINE * engines), hard))
    history = payloads(Traffic("", "", batches, 1 << 40))
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2 * engines + 8)
        all_engines = [_IdleEngine(context, history) for _ in range(engines)]
        pipe.send([engine.endpoints for engine in all_engines])
        await asyncio.Event().wait()


class _IdleEngine:
    """Everything it has to say is said; it is asked again and again whether there is more."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], history: list[bytes]) -> None:
        self._history = history
        self._events = context.socket(zmq.PUB)
        self._replays = context.socket(zmq.ROUTER)
        self._replays.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self.endpoints = tuple(
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (self._events, self._replays)
        )
        asyncio.get_running_loop().add_reader(self._replays.fileno(), self._answer_all)

    def _answer_all(self) -> None:
        while self._replays.get(zmq.EVENTS) & zmq.POLLIN:
            client, *_, first = self._replays.recv_multipart()
            self._answer(client, int.from_bytes(first, "big"))

    def _answer(self, client: bytes, first: int) -> None:
        for sequence, payload in enumerate(self._history[first:], first):
            self._replays.send_multipart([client, b"", b"", sequence.to_bytes(8, "big"), payload])
        end = END_OF_REPLAY.to_bytes(8, "big")
        self._replays.send_multipart([client, b"", b"", end, b""])

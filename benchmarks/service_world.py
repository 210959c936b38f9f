"""The same fleet for both servers: engines' sockets here, registered over HTTP there.

16 workers hold prompts of the measured lengths and others, 280,000 blocks together; every prompt
asked about is held whole by one of them.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from service_servers import ServerProcess

Tokens: TypeAlias = npt.NDArray[np.uint32]

WORKERS, PAIRS, BLOCK_SIZE, SEED = 16, 280_000, 16, 7
PROMPTS = {512: 64, 8_192: 32, 100_000: 8}
"""How many there are of each length."""

FILLER_TOKENS = 65_536
PATIENCE_S, MOST_SOCKETS = 120.0, 8_192
NAMES_PER_WORKER = 1 << 24
CHECKED = max(PROMPTS.values())
"""Workers, of the first, of which a server is asked whether it knows what they hold."""

TAINTS = ("even", "odd")
"""Of workers, in turn; nothing but requests that name them looks at them."""

MODEL = {"model_name": "m", "routing_group": "g"}


class World:
    """What the engines hold, and their sockets, which publish it to every subscriber."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], workers: int) -> None:
        self._random = np.random.default_rng(SEED)
        self.prompts = {
            tokens: [self._new(tokens) for _ in range(count)] for tokens, count in PROMPTS.items()
        }
        self._held: list[list[Tokens]] = [[] for _ in range(workers)]
        for prompts in self.prompts.values():
            for number, prompt in enumerate(prompts):
                self._held[number % workers].append(prompt)
        for held in self._held:
            self._fill(held)
        self._context = context
        self._sockets: list[zmq.Socket[bytes]] = []

    def register(self, server: ServerProcess) -> None:
        """Register every worker with a server, and tell it what they hold."""
        with server.client() as client:
            for worker_id, held in enumerate(self._held, 1):
                socket = self._engine_socket()
                client.post("/workers", json=_registration(worker_id, socket)).raise_for_status()
                _until_subscribed(socket)
                for sequence, payload in enumerate(_history(worker_id, held)):
                    socket.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
            self._until_held(client)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._held)

    def holder(self, tokens: int, number: int) -> int:
        """The worker that holds a prompt, by the prompt's number."""
        return number % len(self.prompts[tokens]) % len(self._held) + 1

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)

    def _engine_socket(self) -> zmq.Socket[bytes]:
        """Open sockets of engines for a server; those of all servers publish the same."""
        socket = self._context.socket(zmq.XPUB)
        self._sockets.append(socket)
        socket.set(zmq.SNDHWM, 0)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _until_held(self, client: httpx.Client) -> None:
        for held in (*self._held[:CHECKED], self._held[-1]):
            asked = {"token_ids": held[-1].tolist(), **MODEL}
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                answer = client.post("/overlap_scores", json=asked).raise_for_status().json()
                wanted = len(held[-1]) // BLOCK_SIZE
                if any(each["device_blocks"] == wanted for each in answer["workers"]):
                    break
                if time.monotonic() > deadline_s:
                    raise TimeoutError("a server does not hold what was published")
                time.sleep(0.05)

    def _fill(self, held: list[Tokens]) -> None:
        """With others, up to a worker's share; the last is the one looked for."""
        blocks = PAIRS // len(self._held) - sum(len(each) // BLOCK_SIZE for each in held)
        while blocks > 0:
            tokens = min(blocks * BLOCK_SIZE, FILLER_TOKENS)
            held.append(self._new(tokens))
            blocks -= tokens // BLOCK_SIZE

    def _new(self, tokens: int) -> Tokens:
        return self._random.integers(0, 100_000, tokens, dtype=np.uint32)


@contextmanager
def running_world(workers: int) -> Iterator[World]:
    """Sockets open, and closed afterwards."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        world = World(context, workers)
        try:
            yield world
        finally:
            world.close()


def _registration(worker_id: int, socket: zmq.Socket[bytes]) -> dict[str, object]:
    endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return {
        **MODEL,
        "worker_id": worker_id,
        "endpoint": f"http://worker-{worker_id}:8000",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8_192,
        "total_kv_blocks": 2 * PAIRS // WORKERS,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "taints": [TAINTS[worker_id % len(TAINTS)]],
        "kv_events_endpoints": {"0": endpoint},
    }


def _until_subscribed(socket: zmq.Socket[bytes]) -> None:
    if not socket.poll(int(PATIENCE_S * 1e3)):
        raise TimeoutError("a server does not subscribe")
    socket.recv()


def _history(worker_id: int, held: Sequence[Tokens]) -> Iterator[bytes]:
    """Batches of vLLM's, one event each, under names of the engine's own."""
    name = worker_id * NAMES_PER_WORKER
    for tokens in held:
        blocks = len(tokens) // BLOCK_SIZE
        names = list(range(name, name + blocks))
        name += blocks
        kept = tokens[: blocks * BLOCK_SIZE].tolist()
        event = ["BlockStored", names, None, kept, BLOCK_SIZE, None, "GPU"]
        yield msgspec.msgpack.encode([0.0, [event], 0])

"""An engine reduced to its sockets: batches as vLLM publishes them, and their replay."""

import time
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import zmq
from msgspec import Struct, msgpack

from router.publisher.batch_order.frames import END_OF_REPLAY

BLOCK_SIZE, EVENT_BLOCKS, BATCH_EVENTS = 16, 16, 8
BATCH_BLOCKS = EVENT_BLOCKS * BATCH_EVENTS
VOCABULARY = 128_000
PATH_BATCHES = 4
"""Batches of a path; then another prompt begins."""

HIGH_WATER_MARK = 100_000
IDLE_S = 0.02
SETTLE_S = 0.5
STOP = b"stop"


class Traffic(Struct, frozen=True):
    """What is published, and where. `pool_blocks`: beyond it, each block removed is an event."""

    events_endpoint: str
    replay_endpoint: str
    batches: int
    pool_blocks: int

    @property
    def blocks(self) -> int:
        """Blocks stored."""
        return self.batches * BATCH_BLOCKS


@lru_cache(maxsize=1)
def payloads(traffic: Traffic) -> list[bytes]:
    """Every batch, encoded in maps as vLLM 0.24 and later does."""
    return [msgpack.encode((0.0, events, 0)) for events in _batches(traffic)]


def last_path(traffic: Traffic) -> list[int]:
    """Tokens of the prompt whose blocks are the last to be stored."""
    tokens: list[int] = []
    for payload in payloads(traffic)[-PATH_BATCHES:]:
        for event in msgpack.decode(payload)[1]:
            tokens += event.get("token_ids", ())
    return tokens


def _batches(traffic: Traffic) -> Iterator[list[dict[str, object]]]:
    random = np.random.default_rng(1)
    pool: deque[int] = deque()
    parent = None
    for number in range(traffic.batches):
        if number % PATH_BATCHES == 0:
            parent = None
        events = []
        for _ in range(BATCH_EVENTS):
            names = random.integers(1 << 63, 1 << 64, EVENT_BLOCKS, dtype=np.uint64).tolist()
            tokens = random.integers(0, VOCABULARY, EVENT_BLOCKS * BLOCK_SIZE).tolist()
            events.append(_stored(names, parent, tokens))
            pool.extend(names)
            parent = names[-1]
        while len(pool) > traffic.pool_blocks:
            events.append(_removed(pool.popleft()))
        yield events


def _stored(names: list[int], parent: int | None, tokens: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _removed(name: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}


def run_engine(traffic: Traffic) -> float:
    """Publish nothings until a reader has settled, then everything at once, until the stop signal.
    Returns when (`time.monotonic`) the first of everything was published.
    """
    batches = payloads(traffic)
    with zmq.Context() as context:
        engine = _Engine(context, traffic)
        while not engine.is_followed:
            engine.publish(msgpack.encode((0.0, [], 0)))
            engine.answer(IDLE_S)
        start_s = time.monotonic()
        for payload in batches:
            engine.publish(payload)
        while not engine.is_stopped:
            engine.answer(IDLE_S)
        engine.close()
        return start_s


class _Engine:
    """A PUB socket, and a ROUTER socket that repeats what it sent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], traffic: Traffic) -> None:
        self._events = context.socket(zmq.PUB)
        self._replays = context.socket(zmq.ROUTER)
        for socket in (self._events, self._replays):
            socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.set(zmq.LINGER, 0)
        self._events.bind(traffic.events_endpoint)
        self._replays.bind(traffic.replay_endpoint)
        self._sent: list[bytes] = []
        self._asked_s = float("inf")
        self.is_stopped = False

    @property
    def is_followed(self) -> bool:
        return time.monotonic() > self._asked_s + SETTLE_S

    def publish(self, payload: bytes) -> None:
        self._events.send_multipart([b"", len(self._sent).to_bytes(8, "big"), payload])
        self._sent.append(payload)

    def answer(self, wait_s: float) -> None:
        if not self._replays.poll(int(1000 * wait_s)):
            return
        client, *_, first = self._replays.recv_multipart()
        if first == STOP:
            self.is_stopped = True
            return
        self._asked_s = min(self._asked_s, time.monotonic())
        start = int.from_bytes(first, "big")
        for sequence, payload in enumerate(self._sent[start:], start):
            answer = [client, b"", b"", sequence.to_bytes(8, "big"), payload]
            self._replays.send_multipart(answer)
        end = END_OF_REPLAY.to_bytes(8, "big")
        self._replays.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        self._events.close()
        self._replays.close()

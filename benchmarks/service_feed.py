"""An engine that tells a service of 200,000 new blocks a second, from a process of its own."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import msgspec
import numpy as np
import zmq
from events_processes import free_port
from service_world import BLOCK_SIZE

WORKER_ID, PER_S, EVENT_BLOCKS = 99, 200_000, 128
POOL_BLOCKS = 1_000_000


@contextmanager
def fed(url: str) -> Iterator[Callable[[], float]]:
    """A worker of another group, told of blocks meanwhile; gives how many a second there were."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    sent = context.Value("q", 0)
    engine = context.Process(target=_tell, args=(endpoint, sent), daemon=True)
    engine.start()
    with httpx.Client(base_url=url, timeout=60.0) as client:
        client.post("/workers", json=_registration(endpoint)).raise_for_status()
        time.sleep(1.0)
        begun, begun_s = sent.value, time.monotonic()
        try:
            yield lambda: (sent.value - begun) / (time.monotonic() - begun_s)
        finally:
            engine.terminate()
            engine.join()
            client.delete(f"/workers/{WORKER_ID}").raise_for_status()


def _tell(endpoint: str, sent: "multiprocessing.sharedctypes.Synchronized[int]") -> None:
    tokens = np.random.default_rng(1).integers(0, 100_000, EVENT_BLOCKS * BLOCK_SIZE).tolist()
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.bind(endpoint)
        socket.recv()
        start_s = time.monotonic()
        for number in range(1 << 40):
            names = list(range(number * EVENT_BLOCKS + 1, (number + 1) * EVENT_BLOCKS + 1))
            tokens[0] = number % 100_000  # another prompt each time
            events: list[object] = [["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]]
            if names[0] > POOL_BLOCKS:
                events.append(["BlockRemoved", [each - POOL_BLOCKS for each in names], "GPU"])
            payload = msgspec.msgpack.encode([0.0, events, 0])
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            sent.value += EVENT_BLOCKS
            time.sleep(max(0.0, start_s + sent.value / PER_S - time.monotonic()))


def _registration(endpoint: str) -> dict[str, object]:
    return {
        "worker_id": WORKER_ID,
        "model_name": "fed",
        "routing_group": "g",
        "endpoint": "http://fed:8000",
        "block_size": BLOCK_SIZE,
        "total_kv_blocks": 2 * POOL_BLOCKS,
        "max_num_batched_tokens": 8_192,
        "kv_events_endpoints": {"0": endpoint},
    }

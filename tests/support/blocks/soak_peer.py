"""Another worker of a soak: a process that holds every block, and a way to it that forges bytes."""

import os
import random
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch
from torch import Tensor

from router.protocol.values import Rank
from support.processes.servers import free_port, wait_for_port
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import BlockName
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.shared_pool import SharedPool
from worker_agent.sharing.leases import Leases
from worker_agent.sharing.peer_server import PeerServer
from worker_agent.sharing.shared_sets import SharedSet
from worker_agent.storage.memory import host_memory
from worker_agent.transfer.block_window import BlockWindow
from worker_agent.transfer.physical import physical
from worker_agent.transfer.slots import MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

TOKEN = b"of a soak"
RANK = Rank(9, 0)
LONGEST_S = 3600
"""A process ends after this time, whatever became of the one that started it."""


class PeerProcess:
    """The process, which can be killed and started again at the same address."""

    def __init__(self, contents: Tensor, name: Callable[[int], BlockName]) -> None:
        self.port = free_port()
        self._contents = contents
        self._name = name
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Start it if it does not run, and let it go on if it is stopped."""
        if self.pid:
            os.kill(self.pid, signal.SIGCONT)
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                return
        self.pid = os.fork()
        if not self.pid:
            signal.alarm(LONGEST_S)
            torch.set_num_threads(1)  # Threads of OpenMP are not there in a fork.
            try:
                _serve(self.port, self._contents, self._name)
            finally:
                os._exit(1)
        wait_for_port(self.port)

    def end(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(port: int, contents: Tensor, name: Callable[[int], BlockName]) -> None:
    count, block_bytes = contents.shape
    memory = host_memory(contents.numel())
    config = LayoutConfig(count, 1, 1, 1, block_bytes // 2)
    layout = physical("9").configured(config).laid_out(LayoutKind.CONTIGUOUS).over_memory([memory])
    pool = SharedPool(count, LruEviction())
    tier = StoredTier(pool, MemorySlots(memory, count))
    tier.store([name(number) for number in range(count)], contents)
    shared = SharedSet(pool, BlockWindow(layout), proof=tier.proof)
    PeerServer(Leases(RANK, 1), {0: shared}, TOKEN, port=port)
    while True:
        signal.pause()


class Relay:
    """An address that leads to another. `is_forging`: a bit of each part from there is changed."""

    def __init__(self, port: int, seed: int) -> None:
        self.is_forging = False
        self._port = port
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._listener.getsockname())
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as far:
            pair = {near: far, far: near}
            while True:
                for source in select.select(pair, [], [])[0]:
                    data = bytearray(source.recv(1 << 16))
                    if not data:
                        return
                    if self.is_forging and source is far:
                        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                    pair[source].sendall(data)

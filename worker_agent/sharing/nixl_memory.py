"""Blocks read from another worker's memory through NIXL: by RDMA where the network has it.

    ours      host sets, registered ─▶ metadata ─▶ given to proven peers, with blocks' addresses
    theirs    metadata ─▶ NixlReads ─▶ transfers into landing memory ─▶ blocks, proven one by one

A landing memory is of no pool: a transfer that is given up and still runs can write only there, not
into a block that holds other content by then. NIXL checks neither who reads nor what was read: the
addresses come, and each block is proven, over the socket. Source: NIXL's Python API, 1.5.
"""

import importlib
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Protocol, cast

import torch
from msgspec import Struct
from torch import Tensor

from router.errors import KvRouterError
from worker_agent.sharing.errors import PeerError
from worker_agent.sharing.peer_messages import Readable, Taken
from worker_agent.sharing.peer_wire import Line
from worker_agent.transfer.block_window import BlockWindow

LANDING_BYTES = 16 << 20
"""Size of a connection's landing memory, if two blocks fit: one half lands while the other is
proven."""
POLL_S = 100e-6
"""Interval between two looks at a transfer, on either side."""
NIXL_NEEDED = "with the package nixl (kv-router[nixl]), where NIXL starts"
MAX_ABANDONED = 16
"""Limit of reads that cannot be stopped; beyond it nothing is read through NIXL until one ends."""
MODULES = "nixl._api", "nixl_cu13._api", "nixl_cu12._api"
_HOST = "DRAM"

AgentName = bytes | str
"""The name of another worker's NIXL agent, as NIXL returns it."""


class NixlUnavailableError(KvRouterError):
    """NIXL cannot be used in this process."""

    code = "nixl"
    http_status = 503


class NixlReadError(PeerError):
    """Memory of another worker that could not be read through NIXL."""


class NixlAgent(Protocol):
    """The part of `nixl_agent` that is used; it raises exceptions of NIXL's own."""

    def register_memory(self, regions: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Register ranges: address, size, device and a name."""

    def deregister_memory(self, registered: Any) -> None:
        """Revoke the registration."""

    def get_agent_metadata(self) -> bytes:
        """Return what another agent needs to read registered memory."""

    def add_remote_agent(self, metadata: bytes) -> AgentName:
        """Connect another agent, and return its name."""

    def remove_remote_agent(self, name: AgentName) -> None:
        """Disconnect another agent."""

    def get_xfer_descs(self, blocks: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Return a list of ranges."""

    def initialize_xfer(self, operation: str, ours: Any, theirs: Any, name: AgentName) -> Any:
        """Prepare a transfer and return its handle."""

    def transfer(self, handle: Any) -> str:
        """Start a transfer; return `DONE`, `PROC` or `ERR`."""

    def check_xfer_state(self, handle: Any) -> str:
        """Return `DONE`, `PROC` or `ERR`."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; it raises as long as it cannot be stopped."""

    def get_new_notifs(self) -> Any:
        """Do what other agents wait for, and return their notifications."""


def _started(name: str) -> NixlAgent:
    """Start NIXL, with its UCX backend. Raises NixlUnavailableError."""
    for module in MODULES:
        with suppress(ImportError):
            api = importlib.import_module(module)
            break
    else:
        raise NixlUnavailableError("NIXL is not installed")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = api.nixl_agent_config(
        backends=["UCX"],
        enable_prog_thread=False,  # It would keep a core busy, also while nothing is read.
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    try:
        return cast("NixlAgent", api.nixl_agent(name, config))
    except Exception as error:  # of the binding's own classes, without a common base
        raise NixlUnavailableError(f"NIXL does not start: {error}") from error


class NixlCounters(Struct):
    """Counters of reads through NIXL since the start."""

    read_blocks: int = 0
    failed_reads: int = 0
    """Requests of which the blocks were then read over the socket."""


class NixlMemory:
    """This process's memory that others may read, and its connections to theirs; for any thread."""

    __slots__ = ("_abandoned", "_connected", "_lock", "_registered", "agent", "counters",
                 "metadata")  # fmt: skip

    def __init__(self, windows: Iterable[BlockWindow]) -> None:
        """Register the windows whose blocks are contiguous on the host.

        Raises NixlUnavailableError.
        """
        self.counters = NixlCounters()
        self.agent = _started(f"kv-{secrets.token_hex(16)}")
        self._lock = Lock()
        self._connected: dict[bytes, _Connected] = {}
        self._abandoned: list[NixlReads] = []
        """Reads that could not be stopped: their memory may still be written."""
        self._registered = None
        regions = [(*each.address_range, 0, "") for each in windows if each.is_in_one_piece]
        try:
            if regions:
                self._registered = self.agent.register_memory(regions, _HOST)
            self.metadata = self.agent.get_agent_metadata()
        except Exception as error:
            raise NixlUnavailableError(f"memory cannot be registered: {error}") from error

    @property
    def connections(self) -> int:
        """The number of other agents that are connected for our reads."""
        return len(self._connected)

    @property
    def abandoned(self) -> int:
        """The number of reads that were given up and cannot be stopped, each with its memory."""
        return len(self._abandoned)

    @property
    def can_read(self) -> bool:
        """False while the limit of abandoned reads is reached."""
        with self._lock:
            self._abandoned = [each for each in self._abandoned if not each.release()]
            return len(self._abandoned) < MAX_ABANDONED

    def progress(self) -> None:
        """Do our part of the reads of others; without RDMA they wait for it."""
        with suppress(Exception):  # Of one that is gone: the socket says so.
            self.agent.get_new_notifs()

    def connect(self, metadata: bytes) -> AgentName:
        """Connect another agent and return its name. Raises exceptions of NIXL's own."""
        with self._lock:
            connected = self._connected.get(metadata)
            if connected is None:
                connected = _Connected(self.agent.add_remote_agent(metadata))
                self._connected[metadata] = connected
            connected.users += 1
            return connected.name

    def disconnect(self, metadata: bytes) -> None:
        """Disconnect another agent, if this is the last of its users."""
        with self._lock:
            connected = self._connected[metadata]
            connected.users -= 1
            if not connected.users:
                del self._connected[metadata]
                with suppress(Exception):  # It may be gone.
                    self.agent.remove_remote_agent(connected.name)

    def abandon(self, reads: "NixlReads") -> None:
        """Keep the memory of reads that still run, until they end."""
        with self._lock:
            self._abandoned.append(reads)

    def close(self) -> None:
        """Revoke the registration; calling it again has no effect."""
        with self._lock:
            registered, self._registered = self._registered, None
            if registered is not None:
                self.agent.deregister_memory(registered)


class _Connected(Struct):
    """A connected agent, and the number of connections that read its memory."""

    name: AgentName
    users: int = 0


class NixlReads:
    """The reads of one connection; for one thread."""

    __slots__ = ("_landing", "_memory", "_metadata", "_name", "_registered", "_running")

    def __init__(self, memory: NixlMemory, metadata: bytes, address: str) -> None:
        """Connect the agent of a worker. `address`: for errors. Raises NixlReadError."""
        self._memory = memory
        self._metadata = metadata
        self._landing: Tensor | None = None
        self._registered: Any = None
        self._running: list[Any] = []
        try:
            self._name = memory.connect(metadata)
        except Exception as error:
            raise NixlReadError(address, f"NIXL: {error}") from error

    def taken(self, line: Line, sent: Readable, room: Sequence[memoryview]) -> Iterator[bool]:
        """Copy blocks to their places, and yield whether each is intact.

        Raises NixlReadError if they cannot be read, and PeerError.
        """
        if len(sent.addresses) != len(room):
            raise PeerError(line.address, f"{len(sent.addresses)} addresses, {len(room)} blocks")
        if not room:
            return
        until_s = time.monotonic() + (line.until_s - time.monotonic()) / 2
        # The rest of the time is for the socket, if no byte comes in this way.
        landed = self._landed(line.address, sent, until_s)
        for view, block in zip(room, landed, strict=True):
            yield line.receive_proof(view, block) is not None
        line.send(Taken())
        self._memory.counters.read_blocks += len(room)

    def close(self) -> None:
        """Disconnect. Memory that a transfer may still write is freed later."""
        self._memory.disconnect(self._metadata)
        if not self.release():
            self._memory.abandon(self)

    def release(self) -> bool:
        """Stop what runs and free the landing memory; return False if something cannot be."""
        self._running = [each for each in self._running if not self._is_released(each)]
        if self._running:
            return False
        self._landing, registered, self._registered = None, self._registered, None
        if registered is not None:
            self._memory.agent.deregister_memory(registered)
        return True

    def _landed(self, address: str, sent: Readable, until_s: float) -> Iterator[memoryview]:
        """Read blocks, and yield each, valid until the next is asked for. Raises NixlReadError."""
        count = max(LANDING_BYTES // 2 // sent.block_bytes, 1)
        starts = range(0, len(sent.addresses), count)
        batches = [sent.addresses[start : start + count] for start in starts]
        try:
            halves = self._halves(count * sent.block_bytes)
            handle = self._started(halves[0], batches[0], sent.block_bytes)
            for number, batch in enumerate(batches):
                self._wait(handle, until_s)
                if number + 1 < len(batches):
                    half = halves[(number + 1) % 2]
                    handle = self._started(half, batches[number + 1], sent.block_bytes)
                landed = halves[number % 2].numpy().data
                for start in range(0, len(batch) * sent.block_bytes, sent.block_bytes):
                    yield landed[start : start + sent.block_bytes]
        except Exception as error:
            raise NixlReadError(address, f"NIXL: {error}") from error

    def _halves(self, size_bytes: int) -> list[Tensor]:
        if self._landing is None or self._landing.numel() < 2 * size_bytes:
            self.release()
            landing = torch.empty(2 * size_bytes, dtype=torch.uint8)
            region = landing.data_ptr(), landing.numel(), 0, ""
            self._registered = self._memory.agent.register_memory([region], _HOST)
            self._landing = landing
        return [self._landing[:size_bytes], self._landing[size_bytes:]]

    def _started(self, half: Tensor, addresses: Sequence[int], block_bytes: int) -> Any:
        agent, to = self._memory.agent, half.data_ptr()
        ours = [(to + place * block_bytes, block_bytes, 0) for place in range(len(addresses))]
        theirs = [(address, block_bytes, 0) for address in addresses]
        described = agent.get_xfer_descs(ours, _HOST), agent.get_xfer_descs(theirs, _HOST)
        handle = agent.initialize_xfer("READ", *described, self._name)
        self._running.append(handle)
        agent.transfer(handle)
        return handle

    def _wait(self, handle: Any, until_s: float) -> None:
        agent = self._memory.agent
        while (state := agent.check_xfer_state(handle)) == "PROC":
            if time.monotonic() >= until_s:
                raise TimeoutError("timed out")
            time.sleep(POLL_S)
        if state != "DONE":
            raise RuntimeError("the transfer failed")
        agent.release_xfer_handle(handle)
        self._running.remove(handle)

    def _is_released(self, handle: Any) -> bool:
        try:
            self._memory.agent.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - of the binding's own classes: it still runs
            return False
        return True

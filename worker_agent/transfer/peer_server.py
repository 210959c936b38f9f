"""Gives other workers blocks, and takes blocks from them: only what leases, or names, allow.

    accept ─▶ a thread a connection: challenge ─▶ proof ─▶ request ─▶ request …

Bytes go from the pool to the socket and back without a copy of ours. Every wait has a deadline.
"""

import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Lock, Thread, current_thread

from msgspec import Struct

from router.blockset_errors import BlocksetError, PeerError
from worker_agent.blockset import BlockDescriptorList
from worker_agent.leases import Leases
from worker_agent.transfer.peer_giving import (
    Giving,
    SharedSet,
    give_bytes,
    give_mapped,
    give_scattered,
    held_by_name,
)
from worker_agent.transfer.peer_listening import address_of, local_listener, tcp_listener
from worker_agent.transfer.peer_messages import (
    VERSION,
    Challenge,
    Get,
    GetNamed,
    Go,
    Proof,
    Put,
    Refused,
    Request,
    Welcome,
    Written,
)
from worker_agent.transfer.peer_wire import (
    CLIENT,
    NONCE_BYTES,
    SERVER,
    Line,
    is_proof,
    proof_of,
)

MAX_CONNECTIONS = 64
MAX_NAMED_BLOCKS = 4096
"""Asked for by name at once, and held meanwhile."""
IDLE_S = 600.0
"""A connection on which nothing is asked for so long is closed."""


class PeerCounters(Struct):
    """What went to other workers and came from them, since the start."""

    sent_blocks: int = 0
    mapped_blocks: int = 0
    """Of these, those that were read where they lie."""
    received_blocks: int = 0
    corrupt_blocks: int = 0
    """Came damaged, and do not count."""
    refused: int = 0
    """Requests that no lease allows, connections without a proof, and too many of them."""
    broken: int = 0
    """Connections that ended in the middle."""


class PeerServer:
    """Serves from construction to `close`."""

    __slots__ = ("_clock", "_closed", "_connections", "_leases", "_listeners", "_lock",
                 "_max_connections", "_serving", "_sets", "_threads", "_timeout_s", "_tls",
                 "_token", "addresses", "counters")  # fmt: skip

    def __init__(
        self,
        leases: Leases,
        sets: Mapping[int, SharedSet],
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sets`: by their index in exports. `token`: of the deployment. `path`: of a socket for
        workers on this host. `timeout_s`: for all that one request moves. `clock`: that of the
        leases. Raises PeerError if nobody can listen there.
        """
        self.counters = PeerCounters()
        self._leases = leases
        self._sets = dict(sorted(sets.items(), key=lambda each: not each[1].can_be_mapped))
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._clock = clock
        self._lock = Lock()
        self._connections: set[socket.socket] = set()
        self._serving: set[Thread] = set()
        self._closed = Event()
        self._listeners = [tcp_listener(host, port)]
        if path is not None:
            self._listeners.append(local_listener(path))
        self.addresses = [address_of(each) for each in self._listeners]
        """Where others find it; that for this host last."""
        self._threads = [
            Thread(target=self._accept, args=each, name="peer-server", daemon=True)
            for each in zip(self._listeners, self.addresses, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def connection_count(self) -> int:
        """Connections now, refused ones not counted."""
        return len(self._connections)

    def close(self, timeout_s: float) -> None:
        """Serve nobody any more, and have let go of all blocks; again is nothing."""
        deadline_s = time.monotonic() + timeout_s
        self._closed.set()
        for listener in self._listeners:
            _hang_up(listener)
        with self._lock:
            connections = list(self._connections)
            serving = list(self._serving)
        for connection in connections:
            _hang_up(connection)
        for thread in (*self._threads, *serving):
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    # ── Connections ──────────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: socket.socket, address: str) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of file descriptors: others will be closed
                continue
            if not self._enter(connection):
                self.counters.refused += 1
                connection.close()
                continue
            self._begin(connection, address)

    def _begin(self, connection: socket.socket, address: str) -> None:
        run = connection, address
        thread = Thread(target=self._serve, args=run, name="peer-connection", daemon=True)
        with self._lock:
            self._serving.add(thread)
        thread.start()

    def _enter(self, connection: socket.socket) -> bool:
        with self._lock:
            if self._closed.is_set() or len(self._connections) >= self._max_connections:
                return False
            self._connections.add(connection)
            return True

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with self._secured(connection, address) as secured:
                line = Line(secured, address, self._deadline_s(self._timeout_s))
                if self._is_proven(line):
                    handed_over: set[int] = set()
                    while self._answer(line, handed_over):
                        pass
        except PeerError:
            self.counters.broken += 1
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._serving.discard(current_thread())
            connection.close()

    def _secured(self, connection: socket.socket, address: str) -> socket.socket:
        if connection.family == socket.AF_UNIX:
            return connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return connection
        try:
            connection.settimeout(self._timeout_s)
            return self._tls.wrap_socket(connection, server_side=True)
        except OSError as error:
            raise PeerError(address, str(error)) from error

    def _is_proven(self, line: Line) -> bool:
        nonce = os.urandom(NONCE_BYTES)
        line.send(Challenge(self._leases.worker_id, nonce))
        proof = line.receive(Proof)
        if proof.version != VERSION:
            return self._refuse(line, "version", f"{proof.version} (allowed: {VERSION})")
        if not is_proof(CLIENT, self._token, nonce, proof.proof):
            return self._refuse(line, "token", "not that of this deployment")
        line.send(Welcome(proof_of(SERVER, self._token, proof.nonce)))
        return True

    def _refuse(self, line: Line, rule: str, reason: str) -> bool:
        self.counters.refused += 1
        line.send(Refused(rule, reason))
        return False

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    def _answer(self, line: Line, handed_over: set[int]) -> bool:
        """One request; False when there are none any more. `handed_over`: sets whose file is."""
        line.until_s = self._deadline_s(IDLE_S)
        request = line.receive_or_end(Request)
        if request is None:
            return False
        line.until_s = self._deadline_s(self._timeout_s)
        try:
            match request:
                case Get():
                    self._give_leased(line, request, handed_over)
                case GetNamed():
                    self._give_named(line, request, handed_over)
                case Put():
                    self._take(line, request)
        except BlocksetError as error:
            self._refuse(line, error.rule, str(error))
        return True

    def _give_leased(self, line: Line, request: Get, handed_over: set[int]) -> None:
        listed, now_s = request.listed, self._clock()
        with self._leases.use(listed, now_s, is_write=False) as blocks:
            unproven = [None] * len(blocks)
            giving = Giving(listed.block_set_idx, self._shared(listed), blocks, [], unproven)
            self._give(line, giving, handed_over if request.may_map else None)

    def _give_named(self, line: Line, request: GetNamed, handed_over: set[int]) -> None:
        """Each from the first set that has it, memory that can be mapped first."""
        if len(request.identities) > MAX_NAMED_BLOCKS:
            reason, allowed = f"{len(request.identities)} blocks", f"at most {MAX_NAMED_BLOCKS}"
            raise BlocksetError("identities", reason, allowed, rule="too_many_blocks")
        with ExitStack() as held:
            parts, missing = held_by_name(request.identities, self._sets, held)
            if len(parts) == 1:
                [part] = parts
                blocks, proofs = part.blocks, part.proofs
                giving = Giving(part.set_idx, part.shared, blocks, missing, proofs)
                self._give(line, giving, handed_over if request.may_map else None)
                return
            give_scattered(line, parts, missing)
            self.counters.sent_blocks += len(request.identities) - len(missing)

    def _give(self, line: Line, giving: Giving, handed_over: set[int] | None) -> None:
        """`handed_over`: None if the client does not map."""
        if giving.can_be_mapped and handed_over is not None and line.is_local:
            give_mapped(line, giving, handed_over)
            self.counters.mapped_blocks += len(giving.blocks)
        else:
            give_bytes(line, giving)
        self.counters.sent_blocks += len(giving.blocks)

    def _take(self, line: Line, request: Put) -> None:
        listed, now_s = request.listed, self._clock()
        with self._leases.use(listed, now_s, is_write=True) as blocks:
            window = self._shared(listed).window
            line.send(Go(window.block_bytes))
            incoming = window.incoming(blocks)
            right = [line.receive_block(view) for view in incoming.views]
            corrupt = [place for place, is_right in enumerate(right) if not is_right]
            incoming.landed([place for place, is_right in enumerate(right) if is_right])
            self.counters.received_blocks += len(blocks) - len(corrupt)
            self.counters.corrupt_blocks += len(corrupt)
            line.send(Written(corrupt))

    def _shared(self, listed: BlockDescriptorList) -> SharedSet:
        shared = self._sets.get(listed.block_set_idx)
        if shared is None:
            allowed = ", ".join(map(str, self._sets))
            where = f"{listed.block_set_idx}"
            raise BlocksetError("block_set_idx", where, allowed, rule="unknown_set")
        return shared

    def _deadline_s(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it was not connected any more
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()

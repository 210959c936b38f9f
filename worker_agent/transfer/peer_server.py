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
from threading import Event, Lock, Thread

from msgspec import Struct

from router.blockset_errors import BlocksetError, PeerError
from worker_agent.blockset import BlockDescriptorList
from worker_agent.leases import Leases
from worker_agent.transfer.peer_giving import Giving, SharedSet, give_bytes, give_mapped
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
    Sent,
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
                 "_max_connections", "_sets", "_threads", "_timeout_s", "_tls", "_token",
                 "addresses", "counters")  # fmt: skip

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
        self._sets = sets
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._clock = clock
        self._lock = Lock()
        self._connections: set[socket.socket] = set()
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

    def close(self, timeout_s: float) -> None:
        """Serve nobody any more; again is nothing."""
        self._closed.set()
        for listener in self._listeners:
            _hang_up(listener)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _hang_up(connection)
        for thread in self._threads:
            thread.join(timeout_s)

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
            run = (connection, address)
            Thread(target=self._serve, args=run, name="peer-connection", daemon=True).start()

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
            giving = Giving(listed.block_set_idx, self._shared(listed), blocks, [])
            self._give(line, giving, handed_over if request.may_map else None)

    def _give_named(self, line: Line, request: GetNamed, handed_over: set[int]) -> None:
        """From the first set that has any of them."""
        with ExitStack() as held:
            for index, shared in self._sets.items():
                blocks = shared.pool.hold(request.identities)
                found = [block for block in blocks if block is not None]
                held.callback(shared.pool.release, found)
                if found:
                    missing = [place for place, block in enumerate(blocks) if block is None]
                    giving = Giving(index, shared, found, missing)
                    self._give(line, giving, handed_over if request.may_map else None)
                    return
        line.send(Sent(list(range(len(request.identities))), 0))

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

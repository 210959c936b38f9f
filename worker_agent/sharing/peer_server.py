"""The server that exchanges blocks with other workers, as far as leases or identities allow.

    accept ─▶ a thread a connection: challenge ─▶ proof ─▶ request ─▶ request …

Bytes go between the pool and the socket without an intermediate copy. Every wait has a deadline.
"""

import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread, current_thread

from msgspec import Struct

from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.sharing.accepting import (
    Guests,
    accept_until,
    address_of,
    hang_up,
    local_listener,
    secured,
    tcp_listener,
)
from worker_agent.sharing.errors import BlocksetError, PeerError
from worker_agent.sharing.leases import Leases
from worker_agent.sharing.nixl_memory import NixlMemory
from worker_agent.sharing.peer_messages import (
    VERSION,
    Challenge,
    Complete,
    End,
    Find,
    Found,
    Get,
    GetNamed,
    Go,
    Named,
    PeerRefused,
    Proof,
    Put,
    Released,
    Request,
    Reserve,
    Welcome,
    Written,
)
from worker_agent.sharing.peer_wire import (
    CLIENT,
    NONCE_BYTES,
    SERVER,
    Line,
    is_proof,
    proof_of,
)
from worker_agent.sharing.receiving import PushReceiver
from worker_agent.sharing.shared_sets import (
    HandedOver,
    Part,
    SharedSet,
    give_bytes,
    give_mapped,
    give_readable,
    held_by_name,
    leased_proofs,
)


def _can_be_read(parts: Sequence[Part]) -> bool:
    """Return whether all blocks are in registered memory, and there are any."""
    return bool(parts) and all(part.shared.window.is_in_one_piece for part in parts)


def _check_count(identities: Sequence[bytes]) -> None:
    """Raise BlocksetError if a request names too many blocks."""
    if len(identities) > MAX_NAMED_BLOCKS:
        reason, allowed = f"{len(identities)} blocks", f"at most {MAX_NAMED_BLOCKS}"
        raise BlocksetError("identities", reason, allowed, rule="too_many_blocks")


MAX_CONNECTIONS = 64
MAX_STRANGERS = 32
"""Limit of connections that are not proven yet; the oldest is disconnected for a new one."""
PROOF_S = 3.0
"""Time in which a peer proves that it knows the token, TLS included."""
MAX_NAMED_BLOCKS = 4096
"""Limit of blocks that one request may name; they are held during the request."""
IDLE_S = 600.0
"""A connection without a request for this time is closed."""


class PeerCounters(Struct):
    """Counters of blocks exchanged with other workers since the start."""

    leased_gets: int = 0
    """Requests for blocks under a lease that were served."""
    puts: int = 0
    sent_blocks: int = 0
    mapped_blocks: int = 0
    """Those of the sent blocks that the peer read from shared memory."""
    read_blocks: int = 0
    """Those of the sent blocks that the peer read from registered memory, through NIXL."""
    received_blocks: int = 0
    corrupt_blocks: int = 0
    """Received damaged, and not counted as received."""
    refused: int = 0
    """Refused requests and connections: no lease, no valid proof, or too many connections."""
    not_accepted: int = 0
    """Connections that failed before a thread served them."""
    broken: int = 0
    """Connections that ended unexpectedly."""


class PeerServer:
    """A server that accepts connections from construction to `close`."""

    __slots__ = ("_clock", "_closed", "_guests", "_leases", "_listeners", "_nixl", "_receiver",
                 "_sets", "_threads", "_timeout_s", "_tls", "_token", "addresses",
                 "counters")  # fmt: skip

    def __init__(
        self,
        leases: Leases,
        sets: Mapping[int, SharedSet],
        token: bytes,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
        receiver: PushReceiver | None = None,
        nixl: NixlMemory | None = None,
    ) -> None:
        """Start listening. Raises PeerError if an address is not available.

        `sets`: by their index in exports. `token`: of the deployment. `host`: None for no port.
        `path`: of a socket for workers on this host. `timeout_s`: for all data of one request.
        `max_connections`: of proven peers. `clock`: the one that the leases use.
        `receiver`: of pushed blocks; None: all are refused. `nixl`: with which all sets on
        the host are registered; None: they are not.
        """
        self.counters = PeerCounters()
        self._leases = leases
        self._sets = dict(sorted(sets.items(), key=lambda each: not each[1].can_be_mapped))
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._clock = clock
        self._receiver = receiver
        self._nixl = nixl
        self._guests = Guests(max_connections, MAX_STRANGERS)
        self._closed = Event()
        self._listeners = [] if host is None else [tcp_listener(host, port)]
        if path is not None:
            self._listeners.append(local_listener(path))
        self.addresses = [address_of(each) for each in self._listeners]
        """Addresses for peers; the one for this host is last."""
        self._threads = [
            Thread(target=self._accept, args=each, name="peer-server", daemon=True)
            for each in zip(self._listeners, self.addresses, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def connection_count(self) -> int:
        """Number of open connections of proven peers."""
        return self._guests.proven_count

    @property
    def stranger_count(self) -> int:
        """Number of open connections that are not proven yet."""
        return self._guests.stranger_count

    def close(self, timeout_s: float) -> None:
        """Stop serving, and release all blocks; calling it again has no effect."""
        deadline_s = time.monotonic() + timeout_s
        self._closed.set()
        for listener in self._listeners:
            hang_up(listener)
            listener.close()
        for thread in (*self._guests.close(), *self._threads):
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    # ── Connections ──────────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: socket.socket, address: str) -> None:
        accept_until(
            self._closed, listener, lambda guest: self._begin(guest, address), self._note_failure
        )

    def _note_failure(self) -> None:
        self.counters.not_accepted += 1

    def _begin(self, connection: socket.socket, address: str) -> None:
        run = connection, address
        thread = Thread(target=self._serve, args=run, name="peer-connection", daemon=True)
        thread.start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            if not self._guests.enter(current_thread(), connection):
                self.counters.refused += 1
            with secured(connection, address, self._tls, self._guests, PROOF_S) as connected:
                line = Line(connected, address, self._deadline_s(PROOF_S))
                if self._is_proven(line):
                    self._answer_all(line)
        except PeerError:
            self.counters.broken += 1
        finally:
            self._guests.leave()
            connection.close()

    def _is_proven(self, line: Line) -> bool:
        nonce = os.urandom(NONCE_BYTES)
        line.send(Challenge(self._leases.rank.worker_id, nonce, dp_rank=self._leases.rank.dp_rank))
        proof = line.receive(Proof)
        if proof.version != VERSION:
            return self._refuse(line, "version", f"{proof.version} (allowed: {VERSION})")
        if not is_proof(CLIENT, self._token, nonce, proof.proof):
            return self._refuse(line, "token", "not the token of this deployment")
        if not self._guests.prove():
            return self._refuse(line, "connections", "too many connections of other workers")
        line.send(Welcome(proof_of(SERVER, self._token, proof.nonce)))
        line.authenticate(self._token, proof.nonce + nonce, is_client=False)
        return True

    def _refuse(self, line: Line, rule: str, reason: str) -> bool:
        self.counters.refused += 1
        line.send(PeerRefused(rule, reason))
        return False

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────

    def _answer_all(self, line: Line) -> None:
        handed_over = HandedOver()
        try:
            while self._answer(line, handed_over):
                pass
        finally:
            self._leases.leave(line)

    def _answer(self, line: Line, handed_over: HandedOver) -> bool:
        """Serve one request; return False if the client closed the connection."""
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
                case _:
                    line.send(self._message(line, request))
        except BlocksetError as error:
            self._refuse(line, error.rule, str(error))
        return True

    def _give_leased(self, line: Line, request: Get, handed_over: HandedOver) -> None:
        listed, now_s = request.listed, self._clock()
        with self._leases.use(listed, now_s, is_write=False) as blocks:
            shared = self._shared(listed)
            proofs = leased_proofs(shared, blocks, request.identities)
            part = Part(listed.block_set_idx, shared, range(len(blocks)), blocks, proofs)
            self._give(line, [part], [], request, handed_over)
            self.counters.leased_gets += 1
        line.send(Released())  # As for `Written`: the owner may take the lease back at once.

    def _message(self, line: Line, request: Find | End | Reserve | Complete) -> Struct:
        """Return the answer to a request without blocks. Raises BlocksetError."""
        match request:
            case Find():
                return self._find(request)
            case End():
                self._leases.end(request.lease)
                return Released()
            case Reserve():
                return self._receiving().reserve(request, line)
            case Complete():
                return Named(self._receiving().complete(request.lease))

    def _find(self, request: Find) -> Found:
        """Return which blocks are here, and mark them as used: they are likely to be read next."""
        _check_count(request.identities)
        with ExitStack() as held:
            _, missing = held_by_name(request.identities, self._sets, held)
        gone = set(missing)
        places = [place for place in range(len(request.identities)) if place not in gone]
        return Found(places)

    def _give_named(self, line: Line, request: GetNamed, handed_over: HandedOver) -> None:
        """Send each block from the first set that has it; sets that can be mapped come first."""
        _check_count(request.identities)
        with ExitStack() as held:
            parts, missing = held_by_name(request.identities, self._sets, held)
            self._give(line, parts, missing, request, handed_over)

    def _give(
        self,
        line: Line,
        parts: Sequence[Part],
        missing: list[int],
        request: Get | GetNamed,
        handed_over: HandedOver,
    ) -> None:
        """Send blocks: in memory that is mapped, in memory that is read, or over the socket."""
        count = sum(len(part.blocks) for part in parts)
        is_one = len(parts) == 1 and parts[0].shared.can_be_mapped
        if is_one and request.may_map and line.is_local:
            give_mapped(line, parts[0], missing, handed_over.sets)
            self.counters.mapped_blocks += count
        elif request.may_read and self._nixl is not None and _can_be_read(parts):
            metadata = b"" if handed_over.has_metadata else self._nixl.metadata
            give_readable(line, parts, missing, metadata, self._nixl.progress)
            handed_over.has_metadata = True
            self.counters.read_blocks += count
        else:
            give_bytes(line, parts, missing)
        self.counters.sent_blocks += count

    def _take(self, line: Line, request: Put) -> None:
        listed, now_s = request.listed, self._clock()
        with self._leases.use(listed, now_s, is_write=True) as blocks:
            window = self._shared(listed).window
            line.send(Go(window.block_bytes))
            incoming = window.incoming(blocks)
            checksums = [line.receive_block(view) for view in incoming.views]
            corrupt = [place for place, each in enumerate(checksums) if each is None]
            incoming.landed([place for place, each in enumerate(checksums) if each is not None])
            right = zip(blocks, checksums, strict=True)
            written = {block: each for block, each in right if each is not None}
            until_s = now_s if self._receiver is None else self._receiver.until_s()
            self._leases.note_written(listed, written, until_s)
            self.counters.puts += 1
            self.counters.received_blocks += len(blocks) - len(corrupt)
            self.counters.corrupt_blocks += len(corrupt)
        # The lease is unused when the peer knows: its owner may take it back at once.
        line.send(Written(corrupt))

    def _receiving(self) -> PushReceiver:
        if self._receiver is None:
            allowed = "a worker with host memory that takes pushes"
            raise BlocksetError("push", "no blocks are taken", allowed, rule="no_receiver")
        return self._receiver

    def _shared(self, listed: BlockDescriptorList) -> SharedSet:
        shared = self._sets.get(listed.block_set_idx)
        if shared is None:
            allowed = ", ".join(map(str, self._sets))
            where = f"{listed.block_set_idx}"
            raise BlocksetError("block_set_idx", where, allowed, rule="unknown_set")
        return shared

    def _deadline_s(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

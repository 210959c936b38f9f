"""A client that loads blocks of another worker, over a socket or from mapped memory."""

import logging
import mmap
import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct, structs
from xxhash import xxh3_64_intdigest

from router.protocol.values import Rank
from router.runtime.security.http_access import ClientTls
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.blocks.names import BlockName
from worker_agent.sharing.errors import BlocksetError, PeerError
from worker_agent.sharing.nixl_memory import NixlMemory, NixlReadError, NixlReads
from worker_agent.sharing.pause import Pause
from worker_agent.sharing.peer_messages import (
    Challenge,
    Complete,
    End,
    Find,
    Found,
    Get,
    GetNamed,
    Go,
    Mapped,
    Named,
    PeerRefused,
    Proof,
    Put,
    Readable,
    Released,
    Reserve,
    Reserved,
    Sent,
    Taken,
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
from worker_agent.transfer.block_window import Incoming
from worker_agent.transfer.plan import BlockResult

T = TypeVar("T", bound=Struct)

log = logging.getLogger(__name__)


class MappedMemory:
    """Mappings received over one connection, by set index."""

    __slots__ = ("_maps",)

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def taken(self, line: Line, sent: Mapped, room: Sequence[memoryview]) -> Iterator[bool]:
        """Copy blocks to their places, and yield whether each is intact, as far as it is verified.

        Raises PeerError, also if the memory does not match the message.
        """
        if sent.has_file:
            self._map(line, sent)
        memory = self._maps.get(sent.set_idx)
        if memory is None or len(sent.offsets) < len(room):
            raise PeerError(line.address, f"the memory of set {sent.set_idx} was not received")
        with memoryview(memory) as whole:
            for place, (offset, view) in enumerate(zip(sent.offsets, room, strict=False)):
                if not 0 <= offset <= len(whole) - sent.block_bytes:
                    raise PeerError(
                        line.address, f"block offset {offset}, memory size {len(whole)}"
                    )
                view[:] = whole[offset : offset + sent.block_bytes]
                check = sent.checks.get(place)
                yield check is None or check == xxh3_64_intdigest(view)
        line.send(Taken())

    def close(self) -> None:
        """Unmap all memory."""
        for memory in self._maps.values():
            memory.close()
        self._maps.clear()

    def _map(self, line: Line, sent: Mapped) -> None:
        descriptor = line.receive_file()
        try:
            memory = mmap.mmap(descriptor, sent.size_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise PeerError(line.address, str(error)) from error
        finally:
            os.close(descriptor)
        former = self._maps.pop(sent.set_idx, None)
        if former is not None:
            former.close()
        self._maps[sent.set_idx] = memory


class PeerClient:
    """One connection to a worker, opened on first use and again after a failure.

    A call blocks for at most `timeout_s`. It is for a thread, one call at a time.
    """

    __slots__ = ("_address", "_is_local", "_line", "_mapped", "_nixl", "_nixl_pause",
                 "_problem", "_reads", "_timeout_s", "_tls", "_token", "_worker_id",
                 "rank")  # fmt: skip

    def __init__(
        self,
        address: str,
        worker_id: int | None,
        token: bytes,
        *,
        timeout_s: float = 30.0,
        tls: ClientTls | None = None,
        nixl: NixlMemory | None = None,
    ) -> None:
        """Create the client, without connecting.

        `address`: `tcp://host:port`, or `unix:///path` on this host, over which blocks in shared
        memory are read by mapping it. `worker_id`: the worker expected at the address; None: any
        that knows the token. `nixl`: to read memory of other hosts, where the worker has it too.
        """
        self.rank: Rank | None = None
        """The rank that was connected last."""
        self._address = address
        self._worker_id = worker_id
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls
        self._line: Line | None = None
        self._problem = ""
        self._is_local = address.startswith("unix://")
        self._mapped = MappedMemory()
        self._nixl = nixl
        self._nixl_pause = Pause(time.monotonic)
        self._reads: NixlReads | None = None

    def get(
        self, listed: BlockDescriptorList, room: Incoming, identities: Sequence[bytes] = ()
    ) -> list[BlockResult]:
        """Copy blocks under a lease into `room` and return their outcomes.

        `identities`: the content expected in them; empty: any. Raises BlocksetError if the owner
        refuses the request. It raises nothing else: after a connection failure the blocks have the
        outcome FAILED.
        """
        count = len(listed.block_indices)
        request = Get(listed, self._is_local, list(identities), self._may_read)
        return self._received(request, count, room, is_leased=True)

    def end(self, listed: BlockDescriptorList) -> None:
        """End a lease that is not used any more; without a connection it ends by itself."""
        try:
            line = self._ready()
            line.send(End(listed.lease))
            line.receive(Released)
        except PeerError:
            self.close()

    def get_named(self, identities: Sequence[bytes], room: Incoming) -> list[BlockResult]:
        """Copy blocks by their identities into `room`; errors are those of `get`."""
        request = GetNamed(list(identities), self._is_local, self._may_read)
        return self._received(request, len(identities), room)

    def find(self, identities: Sequence[bytes]) -> list[int] | None:
        """Return the places of the blocks that the worker has; None after a connection failure.

        Raises BlocksetError if the owner refuses the request.
        """
        found = self._answered(Find(list(identities)), Found)
        return None if found is None else found.places

    def put(self, blocks: Sequence[memoryview], listed: BlockDescriptorList) -> list[BlockResult]:
        """Write our blocks to the target of a write lease. Raises BlocksetError."""
        try:
            line = self._ready()
            line.send(Put(listed))
            self._check_size(_unless_refused(line.receive(Go | PeerRefused)).block_bytes, blocks)
            line.send_blocks(blocks)
            corrupt = set(line.receive(Written).corrupt)
        except PeerError:
            self.close()
            return [BlockResult.FAILED] * len(blocks)
        return [
            BlockResult.CORRUPT if i in corrupt else BlockResult.DONE for i in range(len(blocks))
        ]

    def reserve(self, names: Sequence[BlockName], fingerprint: int) -> Reserved | None:
        """Return a lease to write a prompt's leading blocks; None after a connection failure.

        Raises BlocksetError if the owner refuses the request.
        """
        return self._answered(Reserve(list(names), fingerprint), Reserved)

    def complete(self, lease: str) -> int | None:
        """Have the blocks written under a lease named, and return how many leading ones are.

        Returns None after a connection failure. Raises BlocksetError if the owner refuses it.
        """
        named = self._answered(Complete(lease), Named)
        return None if named is None else named.blocks

    def _answered(self, request: Struct, kind: type[T]) -> T | None:
        try:
            line = self._ready()
            line.send(request)
            answer: T = _unless_refused(line.receive(kind | PeerRefused))
        except PeerError:
            self.close()
            return None
        return answer

    def close(self) -> None:
        """Close the connection; calling it again has no effect."""
        line, self._line = self._line, None
        reads, self._reads = self._reads, None
        self._mapped.close()
        if reads is not None:
            reads.close()
        if line is not None:
            line.close()

    def _received(
        self, request: Get | GetNamed, count: int, room: Incoming, *, is_leased: bool = False
    ) -> list[BlockResult]:
        outcomes = [BlockResult.FAILED] * count
        until_s = time.monotonic() + self._timeout_s
        try:
            try:
                self._receive(request, outcomes, room, until_s, is_leased=is_leased)
            except NixlReadError as error:
                self._note_unread(error)
                request = structs.replace(request, may_read=False)
                self._receive(request, outcomes, room, until_s, is_leased=is_leased)
        except PeerError:
            self.close()
        room.landed([place for place, each in enumerate(outcomes) if each is BlockResult.DONE])
        return outcomes

    def _receive(
        self,
        request: Get | GetNamed,
        outcomes: list[BlockResult],
        room: Incoming,
        until_s: float,
        *,
        is_leased: bool,
    ) -> None:
        """Fill `room` and the outcomes. Raises PeerError, and NixlReadError if that may be why."""
        outcomes[:] = [BlockResult.FAILED] * len(outcomes)
        line = self._ready(until_s)
        line.send(request)
        sent = _unless_refused(line.receive(_kinds(request)))
        missing = set(sent.missing)
        places = [place for place in range(len(outcomes)) if place not in missing]
        for place in missing.intersection(range(len(outcomes))):
            outcomes[place] = BlockResult.MISSING
        if places:
            self._check_size(sent.block_bytes, room.views)
        for place, is_right in zip(places, self._blocks(line, sent, places, room), strict=True):
            outcomes[place] = BlockResult.DONE if is_right else BlockResult.CORRUPT
        if is_leased:
            line.receive(Released)

    def _blocks(
        self, line: Line, sent: Sent | Mapped | Readable, places: Sequence[int], room: Incoming
    ) -> Iterator[bool]:
        """Copy each block to its place and yield whether it is intact. Raises PeerError."""
        match sent:
            case Mapped():
                yield from self._mapped.taken(line, sent, [room.views[each] for each in places])
            case Readable():
                reads = self._connected_reads(line, sent)
                yield from reads.taken(line, sent, [room.views[each] for each in places])
                self._nixl_pause.note(failed=False)
            case Sent():
                for place in places:
                    yield line.receive_block(room.views[place]) is not None

    @property
    def _may_read(self) -> bool:
        return self._nixl is not None and not self._nixl_pause.is_on and self._nixl.can_read

    def _connected_reads(self, line: Line, sent: Readable) -> NixlReads:
        """Return the reads of this connection. Raises PeerError."""
        if self._reads is None:
            if self._nixl is None or not sent.metadata:
                raise PeerError(line.address, "its memory cannot be read without metadata")
            self._reads = NixlReads(self._nixl, sent.metadata, line.address)
        return self._reads

    def _note_unread(self, error: NixlReadError) -> None:
        assert self._nixl is not None
        log.warning("%s; its blocks are read over the socket", error)
        self._nixl.counters.failed_reads += 1
        self._nixl_pause.note(failed=True)
        self.close()

    def _check_size(self, block_bytes: int, blocks: Sequence[memoryview]) -> None:
        odd = next((len(block) for block in blocks if len(block) != block_bytes), None)
        if odd is not None:
            self.close()
            reason, allowed = f"{odd} bytes", f"{block_bytes}, as the other worker's"
            raise BlocksetError("blocks", reason, allowed, rule="other_layout")

    def _ready(self, until_s: float | None = None) -> Line:
        """Return a connection with this, or else a new, deadline, one that is open.

        A worker closes connections that are idle, and when it ends; its next process may be there.
        Raises PeerError.
        """
        if until_s is None:
            until_s = time.monotonic() + self._timeout_s
        if self._line is not None and self._line.has_input:  # Its end: no message is expected.
            self.close()
        if self._line is None:
            self._line = self._connected(until_s)
        self._line.until_s = until_s
        return self._line

    def _connected(self, until_s: float) -> Line:
        try:
            connected = self._opened()
        except ssl.SSLError as error:
            self._warn(_tls_problem(error))
            raise PeerError(self._address, str(error)) from error
        except (OSError, ValueError) as error:
            raise PeerError(self._address, str(error)) from error
        line = Line(connected, self._address, until_s)
        try:
            self._introduce(line)
        except (PeerError, BlocksetError):
            line.close()
            raise
        self._problem = ""
        return line

    def _warn(self, problem: str) -> None:
        """Log what prevents every connection to this address, until there is one."""
        if problem != self._problem:
            log.error("no blocks from %s: %s", self._address, problem)
        self._problem = problem

    def _opened(self) -> socket.socket:
        at = urlsplit(self._address)
        if self._is_local:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.settimeout(self._timeout_s)
            try:
                local.connect(at.path)
            except OSError:
                local.close()
                raise
            return local
        remote = socket.create_connection((at.hostname or "", at.port or 0), self._timeout_s)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return remote
        return self._tls.context().wrap_socket(remote, server_hostname=at.hostname)

    def _introduce(self, line: Line) -> None:
        try:
            challenge = line.receive(Challenge)
        except PeerError:
            if self._tls is None and not self._is_local and time.monotonic() >= line.until_s:
                self._warn("no greeting: it stalls, or demands TLS, which is not set here")
            raise
        if self._worker_id not in {None, challenge.worker_id}:
            reason = f"worker {challenge.worker_id} listens there, not {self._worker_id}"
            raise PeerError(self._address, reason)
        nonce = os.urandom(NONCE_BYTES)
        line.send(Proof(proof_of(CLIENT, self._token, challenge.nonce), nonce))
        welcome = _unless_refused(line.receive(Welcome | PeerRefused))
        if not is_proof(SERVER, self._token, nonce, welcome.proof):
            raise PeerError(self._address, "the server that listens there does not know the token")
        line.authenticate(self._token, nonce + challenge.nonce, is_client=True)
        self.rank = Rank(challenge.worker_id, challenge.dp_rank)


def _kinds(request: Get | GetNamed) -> Any:
    """Return the types of messages that may answer a request."""
    kinds: Any = Sent | PeerRefused
    if request.may_map:
        kinds |= Mapped
    if request.may_read:
        kinds |= Readable
    return kinds


def _tls_problem(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "it sends without TLS, which is demanded here"
    return f"no TLS connection: {error.reason or error}"


_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
"""What OpenSSL makes of a peer that sends something else."""


def _unless_refused(answer: Any) -> Any:
    if isinstance(answer, PeerRefused):
        raise BlocksetError("request", answer.reason, "what the owner allows", rule=answer.rule)
    return answer

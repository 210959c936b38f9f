"""Blocks of another worker, had over a socket; what went wrong is an outcome for each block."""

import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from router.blockset_errors import BlocksetError, PeerError
from worker_agent.blockset import BlockDescriptorList
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.peer_memory import MappedMemory
from worker_agent.transfer.peer_messages import (
    Challenge,
    Get,
    GetNamed,
    Go,
    Mapped,
    Proof,
    Put,
    Refused,
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
from worker_agent.transfer.window import Incoming


class PeerClient:
    """One connection, made when it is needed, and again after it broke. Calls block until
    `timeout_s` is over at the latest: for a thread, one at a time.
    """

    __slots__ = ("_address", "_is_local", "_line", "_memory", "_timeout_s", "_tls", "_token",
                 "_worker_id")  # fmt: skip

    def __init__(
        self,
        address: str,
        worker_id: int,
        token: bytes,
        *,
        timeout_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`address`: `tcp://host:port`, or `unix:///path` on this host, where blocks in shared
        memory are read where they lie. `worker_id`: who is expected there.
        """
        self._address = address
        self._worker_id = worker_id
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls
        self._line: Line | None = None
        self._is_local = address.startswith("unix://")
        self._memory = MappedMemory()

    def get(self, listed: BlockDescriptorList, room: Incoming) -> list[Outcome]:
        """Blocks under a lease into room of ours. Raises BlocksetError for what the owner refuses;
        nothing else: a connection that breaks is blocks that failed.
        """
        return self._received(Get(listed, self._is_local), len(listed.block_indices), room)

    def get_named(self, identities: Sequence[bytes], room: Incoming) -> list[Outcome]:
        """Blocks by what they hold; like `get`."""
        return self._received(GetNamed(list(identities), self._is_local), len(identities), room)

    def put(self, blocks: Sequence[memoryview], listed: BlockDescriptorList) -> list[Outcome]:
        """Blocks of ours to where a lease lets us write. Raises BlocksetError."""
        try:
            line = self._ready()
            line.send(Put(listed))
            self._check_size(_unless_refused(line.receive(Go | Refused)).block_bytes, blocks)
            line.send_blocks(blocks)
            corrupt = set(line.receive(Written).corrupt)
        except PeerError:
            self.close()
            return [Outcome.FAILED] * len(blocks)
        return [Outcome.CORRUPT if i in corrupt else Outcome.DONE for i in range(len(blocks))]

    def close(self) -> None:
        """Hang up; again is nothing."""
        line, self._line = self._line, None
        self._memory.close()
        if line is not None:
            line.close()

    def _received(self, request: Get | GetNamed, count: int, room: Incoming) -> list[Outcome]:
        outcomes = [Outcome.FAILED] * count
        try:
            line = self._ready()
            line.send(request)
            sent: Sent | Mapped = _unless_refused(line.receive(Sent | Mapped | Refused))
            missing = set(sent.missing)
            places = [place for place in range(count) if place not in missing]
            for place in missing.intersection(range(count)):
                outcomes[place] = Outcome.MISSING
            if places:
                self._check_size(sent.block_bytes, room.views)
            for place, is_right in zip(places, self._blocks(line, sent, places, room), strict=True):
                outcomes[place] = Outcome.DONE if is_right else Outcome.CORRUPT
        except PeerError:
            self.close()
        room.landed([place for place, each in enumerate(outcomes) if each is Outcome.DONE])
        return outcomes

    def _blocks(
        self, line: Line, sent: Sent | Mapped, places: Sequence[int], room: Incoming
    ) -> Iterator[bool]:
        """Each to its place, and whether it is right. Raises PeerError."""
        if isinstance(sent, Mapped):
            yield from self._memory.taken(line, sent, [room.views[place] for place in places])
            return
        for place in places:
            yield line.receive_block(room.views[place])

    def _check_size(self, block_bytes: int, blocks: Sequence[memoryview]) -> None:
        odd = next((len(block) for block in blocks if len(block) != block_bytes), None)
        if odd is not None:
            self.close()
            reason, allowed = f"{odd} bytes", f"{block_bytes}, as the other worker's"
            raise BlocksetError("blocks", reason, allowed, rule="other_layout")

    def _ready(self) -> Line:
        """A connection with time left. Raises PeerError."""
        until_s = time.monotonic() + self._timeout_s
        if self._line is None:
            self._line = self._connected(until_s)
        self._line.until_s = until_s
        return self._line

    def _connected(self, until_s: float) -> Line:
        try:
            connected = self._opened()
        except (OSError, ValueError) as error:
            raise PeerError(self._address, str(error)) from error
        line = Line(connected, self._address, until_s)
        try:
            self._introduce(line)
        except (PeerError, BlocksetError):
            line.close()
            raise
        return line

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
        return self._tls.wrap_socket(remote, server_hostname=at.hostname)

    def _introduce(self, line: Line) -> None:
        challenge = line.receive(Challenge)
        if challenge.worker_id != self._worker_id:
            reason = f"worker {challenge.worker_id} is there, not {self._worker_id}"
            raise PeerError(self._address, reason)
        nonce = os.urandom(NONCE_BYTES)
        line.send(Proof(proof_of(CLIENT, self._token, challenge.nonce), nonce))
        welcome = _unless_refused(line.receive(Welcome | Refused))
        if not is_proof(SERVER, self._token, nonce, welcome.proof):
            raise PeerError(
                self._address, "another server listens there, which does not know the token"
            )


def _unless_refused(answer: Any) -> Any:
    if isinstance(answer, Refused):
        raise BlocksetError("request", answer.reason, "what the owner allows", rule=answer.rule)
    return answer

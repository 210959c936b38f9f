"""How two workers talk over a socket, and prove who they are; what they say is in `peer_messages`.

A message is its length (u32, little-endian) and msgpack. A block is its bytes and their XXH3 (u64),
straight from where it lies and to where it will; how many there are, and how large, both sides know
from the messages before.
"""

import hmac
import socket
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct as Packing
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_64

from router.blockset_errors import PeerError

MAX_MESSAGE_BYTES = 1 << 20
NONCE_BYTES = 32
CHUNK_BYTES = 1 << 18
"""Of a block at a time: proven while it is in the processor's cache."""
TIMED_EVERY_S = 0.05
"""A wait may end so much late: telling the system how long it may be is a call of its own."""
CLIENT, SERVER = b"kv-peer-client", b"kv-peer-server"
_U32 = Packing("<I")
_U64 = Packing("<Q")


def proof_of(side: bytes, token: bytes, nonce: bytes) -> bytes:
    """That a side knows the token, for one connection; no other side's proof will do."""
    return blake2b(nonce, key=blake2b(token).digest(), digest_size=32, person=side).digest()


def is_proof(side: bytes, token: bytes, nonce: bytes, proof: bytes) -> bool:
    """Whether somebody does, told in constant time."""
    return hmac.compare_digest(proof_of(side, token, nonce), proof)


class Line:
    """A connected socket, until `until_s` (of `time.monotonic`): no call waits longer, but for
    `TIMED_EVERY_S`.

    Everything raises PeerError when the other side is gone, late, or says what cannot be read.
    """

    __slots__ = ("_socket", "_timed_s", "_timed_until_s", "address", "until_s")

    def __init__(self, connected: socket.socket, address: str, until_s: float) -> None:
        self._socket = connected
        self._timed_s = self._timed_until_s = float("-inf")
        self.address = address
        self.until_s = until_s

    def send(self, message: Struct) -> None:
        """A message."""
        encoded = msgspec.msgpack.encode(message)
        self._send(_U32.pack(len(encoded)) + encoded)

    def receive(self, kind: Any) -> Any:
        """A message of this type, or of one of this union."""
        message = self.receive_or_end(kind)
        if message is None:
            raise PeerError(self.address, "hung up")
        return message

    def receive_or_end(self, kind: Any) -> Any:
        """A message, or None where the other side hung up before it began one."""
        head = bytearray(_U32.size)
        if not self._receive_into(memoryview(head), may_end=True):
            return None
        [size_bytes] = _U32.unpack(head)
        if size_bytes > MAX_MESSAGE_BYTES:
            raise PeerError(self.address, f"a message of {size_bytes} bytes")
        encoded = bytearray(size_bytes)
        self._receive_into(memoryview(encoded))
        try:
            return msgspec.msgpack.decode(encoded, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerError(self.address, str(error)) from error

    @property
    def is_local(self) -> bool:
        """Whether files can be handed over."""
        return self._socket.family == socket.AF_UNIX

    def send_file(self, descriptor: int) -> None:
        """Hand an open file over."""
        try:
            self._set_timeout()
            socket.send_fds(self._socket, [b"f"], [descriptor])
        except OSError as error:
            raise PeerError(self.address, str(error) or "gone") from error

    def receive_file(self) -> int:
        """The descriptor of a file that is handed over; the caller's to close."""
        try:
            self._set_timeout()
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise PeerError(self.address, str(error) or "gone") from error
        if len(descriptors) != 1:
            raise PeerError(self.address, "no file was handed over")
        return descriptors[0]

    def send_blocks(
        self, blocks: Sequence[memoryview], proofs: Sequence[int | None] | None = None
    ) -> None:
        """Blocks, each followed by its checksum: that of when it was stored (`proofs`), which also
        tells what memory has spoilt since; where there is none, one made now.
        """
        for block, proof in zip(blocks, proofs or [None] * len(blocks), strict=True):
            if proof is None:
                self._send(_U64.pack(self._send_proving(block)))
            else:
                self._send(block)
                self._send(_U64.pack(proof))

    def _send_proving(self, block: memoryview) -> int:
        """A block; its checksum."""
        checksum = xxh3_64()
        for chunk in _chunks(block):
            checksum.update(chunk)
            self._send(chunk)
        return checksum.intdigest()

    def receive_block(self, block: memoryview) -> bool:
        """A block to where it belongs; whether it is what was sent."""
        checksum, left = xxh3_64(), block
        while len(left):
            count = self._receive_some(left)
            checksum.update(left[:count])  # still in the processor's cache
            left = left[count:]
        tail = bytearray(_U64.size)
        self._receive_into(memoryview(tail))
        return bool(_U64.unpack(tail)[0] == checksum.intdigest())

    def close(self) -> None:
        """Hang up; again is nothing."""
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._set_timeout()
            self._socket.sendall(data)
        except OSError as error:
            raise PeerError(self.address, str(error) or "gone") from error

    def _receive_into(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Fill it; False if the other side hung up before the first byte, and may."""
        left = view
        while len(left):
            count = self._receive_some(left, may_end=may_end and len(left) == len(view))
            if not count:
                return False
            left = left[count:]
        return True

    def _receive_some(self, view: memoryview, *, may_end: bool = False) -> int:
        """What has come of it, at least a byte; 0 where the other side hung up, and may."""
        try:
            self._set_timeout()
            count = self._socket.recv_into(view)
        except OSError as error:
            raise PeerError(self.address, str(error) or "gone") from error
        if not (count or may_end):
            raise PeerError(self.address, "hung up")
        return count

    def _set_timeout(self) -> None:
        now_s = time.monotonic()
        left_s = self.until_s - now_s
        if left_s <= 0:
            raise PeerError(self.address, "late")
        if now_s >= self._timed_s + TIMED_EVERY_S or self._timed_until_s != self.until_s:
            self._timed_s, self._timed_until_s = now_s, self.until_s
            self._socket.settimeout(left_s)


def _chunks(block: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(block), CHUNK_BYTES):
        yield block[start : start + CHUNK_BYTES]

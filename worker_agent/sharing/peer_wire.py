"""The socket between two workers that exchange blocks: framing and authentication.

A message is its length (u32, little-endian) and msgpack. A block is its bytes and their XXH3 (u64),
sent from and received into its memory directly. Both sides know the number and size of blocks from
earlier messages. After the greeting, each message and block ends with its tag, so that no one
between can change it: the checksum shows that a block was damaged, at rest or on the way, the tag
that another wrote it.

    key of a direction = BLAKE2b(both nonces, key=hash of the deployment's token)
    tag of the n-th message or block = AES-GMAC of its bytes under that key, with nonce n

Tags count in order, so that nothing can be repeated, left out or moved. They are no encryption: for
that there is TLS. Source: NIST SP 800-38D.
"""

import hmac
import select
import socket
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct as Packing
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from msgspec import Struct
from xxhash import xxh3_64

from router.protocol.values import UNREADABLE
from worker_agent.sharing.errors import PeerError

MAX_MESSAGE_BYTES = 1 << 20
NONCE_BYTES = 32
CHUNK_BYTES = 1 << 18
"""Bytes of a block handled at a time: they are hashed while in the CPU cache."""
TIMED_EVERY_S = 0.05
"""Interval between updates of a socket's timeout, each a system call; a wait may end this late."""
CLIENT, SERVER = b"kv-peer-client", b"kv-peer-server"
_U32 = Packing("<I")
_U64 = Packing("<Q")


def proof_of(side: bytes, token: bytes, nonce: bytes) -> bytes:
    """Return the proof that this side knows the token, valid for one connection and side."""
    return blake2b(nonce, key=_key_of(token), digest_size=32, person=side).digest()


def is_proof(side: bytes, token: bytes, nonce: bytes, proof: bytes) -> bool:
    """Return whether a proof is right, compared in constant time."""
    return hmac.compare_digest(proof_of(side, token, nonce), proof)


TAG_BYTES = 16
_NONCE_BYTES = 12
_KEY_BYTES = 16


class Tag:
    """The tag of one message or block, of pieces added in order."""

    __slots__ = ("_context",)

    def __init__(self, algorithm: AES, number: int) -> None:
        nonce = number.to_bytes(_NONCE_BYTES, "little")
        self._context = Cipher(algorithm, GCM(nonce)).encryptor()

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Add a piece."""
        self._context.authenticate_additional_data(piece)

    def value(self) -> bytes:
        """Return the tag; to be called once, at the end."""
        self._context.finalize()
        return self._context.tag

    def is_right(self, presented: bytes | bytearray) -> bool:
        """Return whether the presented tag is the one of these pieces."""
        return hmac.compare_digest(self.value(), presented)


class SessionTags:
    """The tags of one direction of a connection, in order."""

    __slots__ = ("_algorithm", "_number")

    def __init__(self, token: bytes, nonces: bytes, sender: bytes) -> None:
        """Derive the key. `nonces`: the client's and the server's; `sender`: up to 16 bytes."""
        key = blake2b(nonces, key=_key_of(token), digest_size=_KEY_BYTES, person=sender).digest()
        self._algorithm = AES(key)
        self._number = 0

    def next(self) -> Tag:
        """Begin the tag of the next message or block."""
        self._number += 1
        return Tag(self._algorithm, self._number)


def _key_of(token: bytes) -> bytes:
    """Return a BLAKE2b key made of a token of any length."""
    return blake2b(token).digest()


class Line:
    """A connected socket with a deadline.

    No call waits beyond `until_s` (of `time.monotonic`) by more than `TIMED_EVERY_S`. All calls
    raise PeerError if the other side is gone, late, or sends invalid data.
    """

    __slots__ = (
        "_receiving", "_sending", "_socket", "_timed_s", "_timed_until_s", "address", "until_s"
    )  # fmt: skip

    def __init__(self, connected: socket.socket, address: str, until_s: float) -> None:
        self._socket = connected
        self._timed_s = self._timed_until_s = float("-inf")
        self._sending: SessionTags | None = None
        self._receiving: SessionTags | None = None
        self.address = address
        self.until_s = until_s

    def authenticate(self, token: bytes, nonces: bytes, *, is_client: bool) -> None:
        """Demand tags of all that follows, and send them. `nonces`: the client's and server's."""
        own, other = (CLIENT, SERVER) if is_client else (SERVER, CLIENT)
        self._sending = SessionTags(token, nonces, own)
        self._receiving = SessionTags(token, nonces, other)

    def send(self, message: Struct) -> None:
        """Send a message."""
        encoded = msgspec.msgpack.encode(message)
        framed = _U32.pack(len(encoded)) + encoded
        if self._sending is not None:
            tag = self._sending.next()
            tag.add(framed)
            framed += tag.value()
        self._send(framed)

    def receive(self, kind: Any) -> Any:
        """Receive a message of this type, or of one type of this union."""
        message = self.receive_or_end(kind)
        if message is None:
            raise PeerError(self.address, "hung up")
        return message

    def receive_or_end(self, kind: Any) -> Any:
        """Receive a message. Returns None if the other side closed the connection before it."""
        head = bytearray(_U32.size)
        if not self._receive_into(memoryview(head), may_end=True):
            return None
        [size_bytes] = _U32.unpack(head)
        if size_bytes > MAX_MESSAGE_BYTES:
            raise PeerError(self.address, f"a message of {size_bytes} bytes")
        encoded = bytearray(size_bytes)
        self._receive_into(memoryview(encoded))
        if self._receiving is not None:
            tag = self._receiving.next()
            tag.add(head)
            tag.add(encoded)
            self._check_tag(tag)
        try:
            return msgspec.msgpack.decode(encoded, type=kind)
        except UNREADABLE as error:
            raise PeerError(self.address, str(error)) from error

    @property
    def is_local(self) -> bool:
        """True if files can be sent."""
        return self._socket.family == socket.AF_UNIX

    @property
    def has_input(self) -> bool:
        """True if bytes have come, or the other side has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send_file(self, descriptor: int) -> None:
        """Send an open file."""
        try:
            self._set_timeout()
            socket.send_fds(self._socket, [b"f"], [descriptor])
        except OSError as error:
            raise PeerError(self.address, str(error) or "connection lost") from error

    def receive_file(self) -> int:
        """Receive a file and return its descriptor, which the caller closes."""
        try:
            self._set_timeout()
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise PeerError(self.address, str(error) or "connection lost") from error
        if len(descriptors) != 1:
            raise PeerError(self.address, "the message carries no file")
        return descriptors[0]

    def send_blocks(
        self, blocks: Sequence[memoryview], proofs: Sequence[int | None] | None = None
    ) -> None:
        """Send blocks, each followed by its checksum.

        `proofs`: checksums from when the blocks were stored, which also reveal later memory errors.
        If one is None, it is computed now.
        """
        for block, proof in zip(blocks, proofs or [None] * len(blocks), strict=True):
            self._send_block(block, proof)

    def send_proof(self, block: memoryview, proof: int | None) -> None:
        """Send the proof of a block alone, as `send_blocks` does: the client reads its memory."""
        self._send_block(block, proof, is_read=True)

    def _send_block(self, block: memoryview, proof: int | None, *, is_read: bool = False) -> None:
        assert self._sending is not None
        tag, checksum = self._sending.next(), xxh3_64()
        for chunk in _chunks(block):
            tag.add(chunk)
            if proof is None:
                checksum.update(chunk)
            if not is_read:
                self._send(chunk)
        tail = _U64.pack(checksum.intdigest() if proof is None else proof)
        tag.add(tail)
        self._send(tail + tag.value())

    def receive_block(self, block: memoryview) -> int | None:
        """Receive a block into its place; return its checksum, or None if that is wrong."""
        return self._proven(self._received(block))

    def receive_proof(self, block: memoryview, read: memoryview) -> int | None:
        """Copy a block that was read through NIXL to its place, and receive its proof.

        Returns as `receive_block`. What is proven is the copy: `read` may still be written.
        """
        return self._proven(_copied(block, read))

    def _received(self, block: memoryview) -> Iterator[memoryview]:
        """Receive a block into its place, and yield it in chunks."""
        left = block
        while len(left):
            count = self._receive_some(left)
            yield left[:count]
            left = left[count:]

    def _proven(self, chunks: Iterator[memoryview]) -> int | None:
        """Return the checksum of a block in chunks, or None if another is received for it."""
        assert self._receiving is not None
        tag, checksum = self._receiving.next(), xxh3_64()
        for chunk in chunks:
            checksum.update(chunk)  # The bytes are still in the CPU cache.
            tag.add(chunk)
        tail = bytearray(_U64.size)
        self._receive_into(memoryview(tail))
        tag.add(tail)
        self._check_tag(tag)
        received = checksum.intdigest()
        return received if _U64.unpack(tail)[0] == received else None

    def close(self) -> None:
        """Close the connection; calling it again has no effect."""
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._set_timeout()
            self._socket.sendall(data)
        except OSError as error:
            raise PeerError(self.address, str(error) or "connection lost") from error

    def _check_tag(self, tag: Tag) -> None:
        """Receive a tag. Raises PeerError if it is not this one."""
        presented = bytearray(TAG_BYTES)
        self._receive_into(memoryview(presented))
        if not tag.is_right(presented):
            raise PeerError(self.address, "its bytes were changed on the way")

    def _receive_into(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Fill `view`; return False if `may_end` and the peer closed before the first byte."""
        left = view
        while len(left):
            count = self._receive_some(left, may_end=may_end and len(left) == len(view))
            if not count:
                return False
            left = left[count:]
        return True

    def _receive_some(self, view: memoryview, *, may_end: bool = False) -> int:
        """Receive at least a byte; return the count, or 0 if `may_end` and the peer closed."""
        try:
            self._set_timeout()
            count = self._socket.recv_into(view)
        except OSError as error:
            raise PeerError(self.address, str(error) or "connection lost") from error
        if not (count or may_end):
            raise PeerError(self.address, "hung up")
        return count

    def _set_timeout(self) -> None:
        now_s = time.monotonic()
        left_s = self.until_s - now_s
        if left_s <= 0:
            raise PeerError(self.address, "timed out")
        if now_s >= self._timed_s + TIMED_EVERY_S or self._timed_until_s != self.until_s:
            self._timed_s, self._timed_until_s = now_s, self.until_s
            self._socket.settimeout(left_s)


def _copied(block: memoryview, read: memoryview) -> Iterator[memoryview]:
    """Copy a block, and yield it in chunks."""
    for place, chunk in zip(_chunks(block), _chunks(read), strict=True):
        place[:] = chunk
        yield place


def _chunks(block: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(block), CHUNK_BYTES):
        yield block[start : start + CHUNK_BYTES]

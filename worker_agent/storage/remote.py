"""Blocks in a Redis that workers share (G4).

    {namespace}:{fingerprint}:{identity}          {checksum, data}; expires
    {namespace}:{fingerprint}:{identity}:lease    who writes it now; expires soon
    {namespace}:{fingerprint}:stored              identities by when they were stored, for the bound

The fingerprint stands for model, dtype and layout: blocks of another one are not found. A block is
written by one worker: the others see its lease, and leave it be. Whatever fails is told of the
block it was.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError

from router.block_errors import StorageError


class Lease(StrEnum):
    """Whether a block is to be written by whoever asks."""

    GRANTED = "granted"
    ALREADY_STORED = "already_stored"
    LEASED = "leased"
    """Another worker writes it."""


class RemoteSettings(Struct, frozen=True):
    """Of the shared store."""

    namespace: str
    fingerprint: str
    """Of model, dtype and layout."""
    owner: str
    """Who leases: unique to this life of this worker."""
    block_bytes: int
    max_blocks: int
    """Of all workers together; what was stored first goes first."""
    ttl_s: float
    lease_s: float = 30.0


class RemoteBlock(Struct, frozen=True):
    """A block to be stored."""

    identity: bytes
    checksum: int
    data: memoryview


class RemoteStorage:
    """Each call is a round trip or two of one pipeline, and blocks for as long as the client's
    timeouts allow: for a thread. Raises StorageError from every call when nobody answers.
    """

    __slots__ = ("_client", "_prefix", "_settings")

    def __init__(self, client: Redis, settings: RemoteSettings) -> None:
        """`client`: of bytes, with timeouts."""
        self._client = client
        self._settings = settings
        self._prefix = f"{settings.namespace}:{settings.fingerprint}:".encode()

    def has(self, identities: Sequence[bytes]) -> list[bool]:
        """Which of these are stored."""
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                pipeline.exists(self._key(identity))
            return [bool(each) for each in _answers(pipeline)]

    def lease(self, identities: Sequence[bytes]) -> list[Lease]:
        """Ask to write these. What is granted is ours for `lease_s`, or until it is put."""
        lease_ms = int(self._settings.lease_s * 1000)
        owner = self._settings.owner
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                key = self._key(identity)
                pipeline.set(key + _LEASE, owner, nx=True, px=lease_ms)
                pipeline.exists(key)
            answers = _answers(pipeline)
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return [
            Lease.ALREADY_STORED if is_stored else Lease.GRANTED if is_ours else Lease.LEASED
            for is_ours, is_stored in pairs
        ]

    def put(self, blocks: Sequence[RemoteBlock], now_s: float) -> list[StorageError | None]:
        """Store blocks, and give their leases back; what went wrong with each, if anything did.

        More than `max_blocks` are not kept: those stored first go.
        """
        ttl_ms = int(self._settings.ttl_s * 1000)
        with self._client.pipeline(transaction=False) as pipeline:
            for block in blocks:
                key = self._key(block.identity)
                pipeline.hset(key, _CHECKSUM, block.checksum.to_bytes(8, "little"))
                pipeline.hset(key, _DATA, block.data)
                pipeline.pexpire(key, ttl_ms)
                pipeline.delete(key + _LEASE)
                pipeline.zadd(self._prefix + _STORED, {block.identity: now_s})
            answers = _answers(pipeline)
        errors = [_error(answers[i : i + 5]) for i in range(0, len(answers), 5)]
        self._keep_bound(now_s)
        return errors

    def get(
        self, identities: Sequence[bytes], targets: Sequence[memoryview]
    ) -> list[int | StorageError | None]:
        """Copy blocks into memory of ours: the checksum each was stored with, None for one that is
        not there, an error for one that cannot be this block.
        """
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                pipeline.hmget(self._key(identity), _CHECKSUM, _DATA)
            answers = _answers(pipeline)
        return [self._taken(*each) for each in zip(answers, targets, strict=True)]

    def remove(self, identities: Sequence[bytes]) -> None:
        """Nobody is to find these."""
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                pipeline.unlink(self._key(identity))
                pipeline.zrem(self._prefix + _STORED, identity)
            _answers(pipeline)

    def _taken(self, answer: object, target: memoryview) -> int | StorageError | None:
        if isinstance(answer, RedisError):
            return _told(answer)
        assert isinstance(answer, list)
        checksum, data = answer
        if checksum is None or data is None:
            return None
        block_bytes = self._settings.block_bytes
        if len(data) != block_bytes or len(checksum) != 8:
            return StorageError("block", f"{len(data)} bytes", f"{block_bytes} bytes")
        target[:block_bytes] = data
        return int.from_bytes(checksum, "little")

    def _keep_bound(self, now_s: float) -> None:
        """Forget what expired, and give up what is too many."""
        stored = self._prefix + _STORED
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zremrangebyscore(stored, "-inf", now_s - self._settings.ttl_s)
            pipeline.zrange(stored, 0, -self._settings.max_blocks - 1)
            surplus = _answers(pipeline)[1]
        if isinstance(surplus, list) and surplus:
            self.remove(surplus)

    def _key(self, identity: bytes) -> bytes:
        return self._prefix + identity.hex().encode()


_LEASE = b":lease"
_STORED = b"stored"
_CHECKSUM = b"c"
_DATA = b"d"


def _answers(pipeline: Pipeline) -> list[object]:
    """One answer a command; a command's own error is its answer. Raises StorageError."""
    try:
        answers: list[object] = pipeline.execute(raise_on_error=False)
    except (RedisError, OSError) as error:
        raise _told(error) from error
    return answers


def _error(answers: Iterable[object]) -> StorageError | None:
    """Of the commands that store one block, the first."""
    return next((_told(each) for each in answers if isinstance(each, RedisError)), None)


def _told(error: Exception) -> StorageError:
    return StorageError("redis", str(error), "a Redis that answers, with room")

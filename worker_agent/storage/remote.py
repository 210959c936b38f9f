"""Blocks in a Redis server that workers share (G4).

    {namespace}:{fingerprint}:{identity}          a block; expires
    {namespace}:{fingerprint}:{identity}:seal     its seal (`seals.py`); expires after it
    {namespace}:{fingerprint}:{identity}:lease    the worker that writes it now; expires soon
    {namespace}:{fingerprint}:stored              identities by time of storing, for the limit

The fingerprint identifies model, dtype, layout and secret: blocks with another one are not found. A
block is written by one worker, its seal first; other workers find its lease, and skip the block. A
separate key for the seal avoids a copy that would join both into one value; a block without its
seal, or the reverse, counts as missing. Failures are reported per block.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from redis import Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import RedisError
from redis.retry import Retry

from router.runtime.security.redis_access import OPEN_ACCESS, RedisAccess
from worker_agent.storage.errors import StorageError


class Lease(StrEnum):
    """The permission of a worker to write a block."""

    GRANTED = "granted"
    ALREADY_STORED = "already_stored"
    LEASED = "leased"
    """Another worker is writing it."""


CLEARED_AT_ONCE = 1000
BRIEFLY_MS = 10_000
_OUTLIVING_MS = 1_000
"""Time by which a seal outlives its block, so that no block is found without a seal."""


class Sealed(Struct, frozen=True):
    """A block's bytes, and its seal."""

    data: bytes | memoryview
    seal: bytes


class RemoteSettings(Struct, frozen=True):
    """Settings of the shared store."""

    namespace: str
    fingerprint: str
    """A fingerprint of model, dtype, layout and secret."""
    owner: str
    """The name that leases are taken under, unique to this incarnation of this worker."""
    block_bytes: int
    max_blocks: int
    """The limit for all workers together; beyond it the blocks stored first are removed."""
    ttl_s: float
    lease_s: float = 30.0


class RemoteStorage:
    """The shared store; call it on a thread, for calls block up to the client's timeouts.

    Each call takes one or two pipelined round trips. Every call raises StorageError if Redis does
    not respond.
    """

    __slots__ = ("_client", "_prefix", "_settings")

    def __init__(self, client: Redis, settings: RemoteSettings) -> None:
        """Create the storage; `client`: one of bytes, with timeouts (`redis_client`)."""
        self._client = client
        self._settings = settings
        self._prefix = f"{settings.namespace}:{settings.fingerprint}:".encode()

    def has(self, identities: Sequence[bytes]) -> list[bool]:
        """Return whether each of these blocks is stored."""
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                key = self._key(identity)
                pipeline.exists(key, key + _SEAL)
            return [each == _BOTH for each in _answers(pipeline)]

    def lease(self, identities: Sequence[bytes]) -> list[Lease | StorageError]:
        """Request leases for writing these; granted ones last for `lease_s`, or until `put`."""
        lease_ms = int(self._settings.lease_s * 1000)
        keys = [self._key(identity) for identity in identities]
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.eval(_LEASE_ALL, len(keys), *keys, self._settings.owner, lease_ms)
            [answer] = _answers(pipeline)
        if isinstance(answer, list):
            return [_LEASES[each] for each in answer]
        error = _error(answer)
        assert error is not None
        return [error] * len(keys)

    def put(
        self, identities: Sequence[bytes], sealed: Sequence[Sealed], now_s: float
    ) -> list[StorageError | None]:
        """Store sealed blocks, at least one, and release their leases.

        Returns the error of each block, or None. Beyond `max_blocks`, the blocks stored first are
        removed.
        """
        ttl_ms = int(self._settings.ttl_s * 1000)
        keys = [self._key(identity) for identity in identities]
        stored = self._prefix + _STORED
        with self._client.pipeline(transaction=False) as pipeline:
            _set_all(pipeline, keys, sealed, ttl_ms)
            pipeline.unlink(*(key + _LEASE for key in keys))
            pipeline.zadd(stored, dict.fromkeys(identities, now_s))
            pipeline.zremrangebyscore(stored, "-inf", now_s - self._settings.ttl_s)
            pipeline.zrange(stored, 0, -self._settings.max_blocks - 1)
            is_sealed, *answers, _, is_noted, _, surplus = _answers(pipeline)
        if isinstance(surplus, list) and surplus:
            self.remove(surplus)
        refused = _error(is_sealed) or _error(is_noted)
        return [_error(each) or refused for each in answers]

    def put_briefly(
        self, identities: Sequence[bytes], sealed: Sequence[Sealed]
    ) -> list[StorageError | None]:
        """Store blocks that are not found and not counted, for measurements."""
        with self._client.pipeline(transaction=False) as pipeline:
            keys = [self._key(identity) for identity in identities]
            _set_all(pipeline, keys, sealed, BRIEFLY_MS)
            is_sealed, *answers = _answers(pipeline)
        return [_error(each) or _error(is_sealed) for each in answers]

    def get(self, identities: Sequence[bytes]) -> list[Sealed | StorageError | None]:
        """Return sealed blocks as stored, None for missing ones; seals are not verified."""
        with self._client.pipeline(transaction=False) as pipeline:
            keys = [self._key(identity) for identity in identities]
            pipeline.mget(*(key + _SEAL for key in keys))
            for key in keys:
                pipeline.get(key)
            seals, *answers = _answers(pipeline)
        if not isinstance(seals, list):
            return [_error(seals)] * len(keys)
        return [_sealed(*each) for each in zip(answers, seals, strict=True)]

    def touch(self, identities: Sequence[bytes], now_s: float) -> None:
        """Extend the lifetime of these, at least one, as if they had been stored now."""
        ttl_ms = int(self._settings.ttl_s * 1000)
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                key = self._key(identity)
                pipeline.pexpire(key + _SEAL, ttl_ms + _OUTLIVING_MS)
                pipeline.pexpire(key, ttl_ms)
            pipeline.zadd(self._prefix + _STORED, dict.fromkeys(identities, now_s), xx=True)
            _answers(pipeline)

    def remove(self, identities: Sequence[bytes]) -> list[bool]:
        """Remove these blocks, at least one. Returns whether each was stored."""
        with self._client.pipeline(transaction=False) as pipeline:
            for identity in identities:
                key = self._key(identity)
                pipeline.unlink(key + _SEAL)
                pipeline.unlink(key)
            pipeline.zrem(self._prefix + _STORED, *identities)
            *answers, _ = _answers(pipeline)
        return [each == 1 for each in answers[1::2]]

    def clear(self) -> None:
        """Remove all blocks of this fingerprint, of all workers."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zrange(self._prefix + _STORED, 0, -1)
            [stored] = _answers(pipeline)
        identities = stored if isinstance(stored, list) else []
        for start in range(0, len(identities), CLEARED_AT_ONCE):
            self.remove(identities[start : start + CLEARED_AT_ONCE])

    def close(self) -> None:
        """Close the client; stored blocks remain."""
        self._client.close()

    def _key(self, identity: bytes) -> bytes:
        return self._prefix + identity.hex().encode()


_LEASE, _SEAL = b":lease", b":seal"
_BOTH = 2
_LEASES = (Lease.GRANTED, Lease.ALREADY_STORED, Lease.LEASED)
_LEASE_ALL = """
local answers = {}
for i, key in ipairs(KEYS) do
  if redis.call('EXISTS', key, key .. ':seal') == 2 then answers[i] = 1
  elseif redis.call('SET', key .. ':lease', ARGV[1], 'NX', 'PX', ARGV[2]) then answers[i] = 0
  else answers[i] = 2 end
end
return answers
"""
"""One script for all: no worker can store a block between the check and the lease."""
_SEAL_ALL = """
for i, key in ipairs(KEYS) do redis.call('SET', key .. ':seal', ARGV[i + 1], 'PX', ARGV[1]) end
"""
_STORED = b"stored"


def _set_all(
    pipeline: Pipeline, keys: Sequence[bytes], sealed: Sequence[Sealed], ttl_ms: int
) -> None:
    """Set all seals with one command, then each block with one command."""
    seals = [block.seal for block in sealed]
    pipeline.eval(_SEAL_ALL, len(keys), *keys, ttl_ms + _OUTLIVING_MS, *seals)
    for key, block in zip(keys, sealed, strict=True):
        pipeline.set(key, block.data, px=ttl_ms)


def _sealed(data: object, seal: object) -> Sealed | StorageError | None:
    if isinstance(data, bytes) and isinstance(seal, bytes):
        return Sealed(data, seal)
    return _error(data)


def _answers(pipeline: Pipeline) -> list[object]:
    """Return one result per command, which may be its error. Raises StorageError."""
    try:
        answers: list[object] = pipeline.execute(raise_on_error=False)
    except (RedisError, OSError, ValueError) as error:  # ValueError: an invalid response
        raise _storage_error(error) from error
    return answers


def _error(answer: object) -> StorageError | None:
    return _storage_error(answer) if isinstance(answer, RedisError) else None


def _storage_error(error: Exception) -> StorageError:
    return StorageError("redis", str(error), "a Redis server that responds, with free memory")


def redis_client(url: str, timeout_s: float, access: RedisAccess = OPEN_ACCESS) -> Redis:
    """Return a client with this timeout and without retries. Raises ConfigError."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        **access.options(url, "remote_cache"),
    )

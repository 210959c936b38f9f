"""The tier shared by workers: blocks in Redis, and those of them published to routers.

    store: leased? ─▶ sealed ─▶ put        skipped if another worker has the lease or stored it
    load:  got ─▶ seal ─▶ an outcome a block; a wrong one is removed for all workers

This worker does not know what others do there: a block may be gone at any lookup. A block that this
worker stored, or found when about to store it, is reported (`take_changes`) until it is gone.
"""

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias, TypeVar

from msgspec import Struct
from torch import Tensor

from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, Change
from worker_agent.blocks.names import IDENTITY_BYTES, BlockName
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.storage.errors import StorageError
from worker_agent.storage.remote import (
    Lease,
    RemoteSettings,
    RemoteStorage,
    Sealed,
)
from worker_agent.storage.seals import BlockSeals
from worker_agent.transfer.block_tier import TierCounters, measured
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.pipeline import batches_of, inward, outward
from worker_agent.transfer.plan import BlockResult


class _Published(Struct, frozen=True):
    name: BlockName
    until_s: float


class RemoteExistence:
    """Published names in the order of their last publication.

    A name expires `ttl_s` after that. Beyond `max_names` the oldest name is removed.
    """

    __slots__ = ("_changes", "_max_names", "_published", "_ttl_s")

    def __init__(self, max_names: int, ttl_s: float) -> None:
        self._max_names = max_names
        self._ttl_s = ttl_s
        self._published: dict[bytes, _Published] = {}
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._published)

    def publish(self, name: BlockName, now_s: float) -> None:
        """Publish a name, or renew its expiry."""
        if self._published.pop(name.identity, None) is None:
            self._changes.append(BlockStored(name))
        self._published[name.identity] = _Published(name, now_s + self._ttl_s)
        if len(self._published) > self._max_names:
            self.forget_remote([next(iter(self._published))])

    def renew(self, identities: Iterable[bytes], now_s: float) -> None:
        """Renew the expiry of those of these blocks that are published."""
        for published in [self._published[each] for each in identities if each in self._published]:
            self.publish(published.name, now_s)

    def forget_remote(self, identities: Iterable[bytes]) -> None:
        """Publish the removal of these blocks."""
        for identity in identities:
            published = self._published.pop(identity, None)
            if published is not None:
                self._changes.append(BlockRemoved(published.name))

    def clear(self) -> None:
        """Publish that no block is there any more."""
        self._published.clear()
        self._changes = [CacheCleared()]

    def take_changes(self, now_s: float) -> list[Change]:
        """Return the changes to publish, in order; names expired by `now_s` are removed first."""
        # A renewed name moves to the end, so the expired ones come first.
        over = takewhile(lambda item: item[1].until_s <= now_s, self._published.items())
        self.forget_remote([identity for identity, _ in over])
        changes, self._changes = self._changes, []
        return changes


T = TypeVar("T")

_Put: TypeAlias = Callable[[Sequence[bytes], Sequence[Sealed]], list[StorageError | None]]

BATCH_BYTES = 16 * 1024 * 1024
MAX_BATCH_BLOCKS = 64
"""Limit of blocks in one pipeline, all responses of which are awaited."""
LEFT_ALONE_S = 5.0
"""Pause after a call without response; meanwhile every call fails at once."""

_OF_LEASE = {
    Lease.GRANTED: BlockResult.FAILED,  # DONE once it is put.
    Lease.ALREADY_STORED: BlockResult.KNOWN,
    Lease.LEASED: BlockResult.BUSY,
}


class RemoteTier:
    """A tier in Redis. Calls block up to the client's timeouts; for a thread, one at a time."""

    __slots__ = (
        "_alone_until_s",
        "_batch_blocks",
        "_clock",
        "_io",
        "_published",
        "_seals",
        "_settings",
        "_storage",
        "counters",
    )

    def __init__(
        self,
        storage: RemoteStorage,
        settings: RemoteSettings,
        *,
        secret: bytes = b"",
        io: IoThreads | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the tier.

        `secret`: of the fleet; without one, seals show damage, but no forgery. `io`: a thread for
        loads, so that blocks are verified while others are received. `clock`: seconds, common to
        all workers.
        """
        self.counters = TierCounters()
        self._storage = storage
        self._settings = settings
        self._seals = BlockSeals(secret)
        self._io = io
        self._clock = clock
        self._batch_blocks = max(min(BATCH_BYTES // settings.block_bytes, MAX_BATCH_BLOCKS), 1)
        self._published = RemoteExistence(settings.max_blocks, settings.ttl_s)
        self._alone_until_s = 0.0

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks of all workers together."""
        return self._settings.max_blocks

    @property
    def is_kept(self) -> bool:
        """True: the blocks are outside of this process."""
        return True

    @property
    def status(self) -> PoolStatus:
        """State as far as it is known here: reported blocks count as stored, the rest as free."""
        return PoolStatus(0, len(self._published), self.num_blocks - len(self._published))

    @property
    def is_down(self) -> bool:
        """True if the store recently did not respond."""
        return self._clock() < self._alone_until_s

    def store(
        self, names: Sequence[BlockName], rows: Tensor, priority: int = 0
    ) -> list[BlockResult]:
        """Store blocks that no worker has stored or is storing."""
        del priority
        identities = [name.identity for name in names]
        leases = self._called(lambda: self._storage.lease(identities))
        if leases is None:
            self.counters.failed += len(names)
            return [BlockResult.FAILED] * len(names)
        outcomes = [
            _OF_LEASE[each] if isinstance(each, Lease) else BlockResult.FAILED for each in leases
        ]
        granted = [place for place, each in enumerate(leases) if each is Lease.GRANTED]
        put = self._put(identities, rows, granted, self._put_counted)
        for place, outcome in zip(granted, put, strict=True):
            outcomes[place] = outcome
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome in {BlockResult.DONE, BlockResult.KNOWN}:
                self._published.publish(name, self._clock())
        self.counters.stored += outcomes.count(BlockResult.DONE)
        self.counters.failed += outcomes.count(BlockResult.FAILED)
        return outcomes

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[BlockResult]:
        """Copy blocks into rows; every block is verified, because it came over a network."""
        del is_sampled
        outcomes = self._get(identities, rows)
        gone = {BlockResult.MISSING, BlockResult.CORRUPT}
        pairs = list(zip(identities, outcomes, strict=True))
        self._published.forget_remote([identity for identity, outcome in pairs if outcome in gone])
        corrupt = [identity for identity, outcome in pairs if outcome is BlockResult.CORRUPT]
        if corrupt:
            self._called(lambda: self._storage.remove(corrupt))
        self.counters.loaded += outcomes.count(BlockResult.DONE)
        self.counters.failed += outcomes.count(BlockResult.FAILED)
        self.counters.corrupt += len(corrupt)
        return outcomes

    def find(self, names: Sequence[BlockName]) -> int:
        """Look up these blocks, stored by any worker, and return how many there are.

        Those found are reported as stored, the others as removed. Returns 0 if the store does not
        respond.
        """
        found = self._called(lambda: self._storage.has([name.identity for name in names]))
        if found is None:
            return 0
        pairs = list(zip(names, found, strict=True))
        for name in [name for name, is_there in pairs if is_there]:
            self._published.publish(name, self._clock())
        self._published.forget_remote([name.identity for name, is_there in pairs if not is_there])
        return sum(found)

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Do nothing: the blocks that an earlier process stored belong to all workers."""
        del rows, until_s
        yield from ()

    def probe(self, rows: Tensor) -> TierProbe | None:
        """Measure the store with blocks of random names. `rows`: written and read.

        Returns None if it fails.
        """
        identities = [os.urandom(IDENTITY_BYTES) for _ in range(len(rows))]
        probe = measured(
            rows,
            lambda: self._put(identities, rows, range(len(rows)), self._storage.put_briefly),
            lambda count: self._get(identities[:count], rows),
        )
        self._called(lambda: self._storage.remove(identities))
        return probe

    def touch(self, identities: Sequence[bytes]) -> None:
        """Renew the expiry of these blocks, as if they were stored now."""
        if not identities:
            return
        self._called(lambda: self._storage.touch(identities, self._clock()))
        self._published.renew(identities, self._clock())

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Remove these blocks from the store; none is removed if the store does not respond."""
        were = self._called(lambda: self._storage.remove(identities)) if identities else []
        if were is None:
            return ResetOutcome([], [], list(identities))
        self._published.forget_remote(identities)
        pairs = list(zip(identities, were, strict=True))
        return ResetOutcome(
            [identity for identity, was_there in pairs if was_there],
            [identity for identity, was_there in pairs if not was_there],
            [],
        )

    def reset(self) -> None:
        """Remove all blocks, like `clear`: blocks here are never in use."""
        self.clear()

    def clear(self) -> None:
        """Remove all blocks of this model from the store."""
        self._called(self._storage.clear)
        self._published.clear()

    def take_changes(self) -> list[Change]:
        """Return the changes of names since the last call, in order."""
        return self._published.take_changes(self._clock())

    def close(self) -> None:
        """Close the connection; the blocks stay."""
        if self._io is not None:
            self._io.close()
        self._storage.close()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _put_counted(
        self, identities: Sequence[bytes], sealed: Sequence[Sealed]
    ) -> list[StorageError | None]:
        return self._storage.put(identities, sealed, self._clock())

    def _put(
        self, identities: Sequence[bytes], rows: Tensor, places: Sequence[int], stored_by: _Put
    ) -> list[BlockResult]:
        sealed: dict[int, list[Sealed]] = {}

        def seal(batch: range, turn: int) -> None:
            chosen = [places[each] for each in batch]
            sealed[turn] = [self._sealed(identities[place], rows[place]) for place in chosen]

        def put(batch: range, turn: int) -> list[BlockResult]:
            chosen = [identities[places[each]] for each in batch]
            errors = self._noting(lambda: stored_by(chosen, sealed[turn]))
            return [BlockResult.FAILED if error else BlockResult.DONE for error in errors]

        # The seals are not made while an I/O thread sends: with Redis on the same two cores
        # they took the server's core (0.45 of a plain pipeline's throughput, against 0.7 this way).
        return outward(None, batches_of(len(places), self._batch_blocks), seal, put)

    def _get(self, identities: Sequence[bytes], rows: Tensor) -> list[BlockResult]:
        def get(batch: range, _: int) -> list[Sealed | StorageError | None]:
            return self._noting(lambda: self._storage.get(identities[batch.start : batch.stop]))

        def prove(
            batch: range, _: int, sealed: list[Sealed | StorageError | None]
        ) -> list[BlockResult]:
            received = zip(batch, sealed, strict=True)
            return [self._opened(identities[p], each, rows[p]) for p, each in received]

        if self.is_down:
            return [BlockResult.FAILED] * len(identities)
        return inward(self._io, batches_of(len(identities), self._batch_blocks), get, prove)

    def _sealed(self, identity: bytes, row: Tensor) -> Sealed:
        """Return a block with its seal; the block's bytes are not copied."""
        data = row.numpy().data
        return Sealed(data, self._seals.seal(identity, data))

    def _opened(
        self, identity: bytes, sealed: Sealed | StorageError | None, row: Tensor
    ) -> BlockResult:
        """Copy a block into `row` if its seal is right, and return the outcome."""
        if sealed is None:
            return BlockResult.MISSING
        if isinstance(sealed, StorageError):
            return BlockResult.FAILED
        data = memoryview(sealed.data)
        has_size = data.nbytes == row.numel()
        if not (has_size and self._seals.is_right(identity, data, sealed.seal)):
            return BlockResult.CORRUPT
        row.numpy().data[:] = data
        return BlockResult.DONE

    def _called(self, call: Callable[[], T]) -> T | None:
        """Return the store's response; None if it does not respond or is paused after a failure."""
        if self.is_down:
            return None
        try:
            if self._io is None:
                return self._noting(call)
            return self._io.wait(self._io.begin(lambda: self._noting(call)))
        except StorageError:
            return None

    def _noting(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StorageError:
            self._alone_until_s = self._clock() + LEFT_ALONE_S
            raise

"""Leases of our blocks to other workers: the owner's side, which alone decides.

    grant ─▶ live ──use──▶ in use ─▶ live          revoke, expire ─▶ gone: refused from now on

    grant a push ─▶ written, block by block ─▶ take_written: its leading written blocks

Blocks of a lease stay in the pool while a transfer uses them, even after its end. Those of a push
cannot be read under it. Callable from any thread. Time and the names of leases are arguments.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from threading import RLock

from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.blocks.handles import Handle, ImmutableBlocks, MutableBlocks
from worker_agent.blocks.names import BlockName
from worker_agent.sharing.blockset import described_blocks
from worker_agent.sharing.errors import BlocksetError


class Push(Struct, eq=False):
    """The blocks that a push writes, by their names, for a connection; see `Leases.grant`."""

    names: Sequence[BlockName]
    connection: object
    checksums: dict[int, int] = {}
    """Of the blocks that are written, until another write of them begins."""
    being_written: set[int] = set()
    arrived: set[int] = set()
    """The blocks that were ever written; a repetition extends no push."""

    def begin(self, blocks: Sequence[int]) -> None:
        """Begin to write blocks: what they have now is of no use if the write does not end well."""
        self.being_written.update(blocks)
        for block in blocks:
            self.checksums.pop(block, None)


class Written(Struct, frozen=True):
    """The leading written blocks of a push, in a handle, with their names and checksums."""

    handle: MutableBlocks
    names: Sequence[BlockName]
    checksums: Sequence[int]


class _Lease:
    """A lease; `users` counts its transfers. An ended lease keeps its blocks until that is 0."""

    __slots__ = ("handle", "has_ended", "push", "set_idx", "until_s", "users")

    def __init__(self, handle: Handle, set_idx: int, until_s: float, push: Push | None) -> None:
        self.handle = handle
        self.set_idx = set_idx
        self.until_s = until_s
        self.push = push
        self.users = 0
        self.has_ended = False


MAX_LEASED_BLOCKS = 1 << 20


class LeaseCounters(Struct):
    """Counters of leases since the start."""

    granted: int = 0
    refused: int = 0
    """Beyond the limit of leased blocks."""
    ended: int = 0
    """Ended by the owner, or by the recipient, which had read or written the blocks."""
    expired: int = 0
    abandoned: int = 0
    """Of pushes whose sender gave up, or whose connection ended."""


class Leases:
    """The leases of one process of a worker; each call is O(blocks of a lease).

    Invariant: the blocks of a lease are in use in their pool exactly while it is live or used.
    """

    __slots__ = ("_leases", "_lock", "_max_blocks", "counters", "epoch", "rank")

    def __init__(self, rank: Rank, epoch: int, max_blocks: int = MAX_LEASED_BLOCKS) -> None:
        """Set up an empty collection, for at most `max_blocks` of each set at a time."""
        self.rank = rank
        self.counters = LeaseCounters()
        self._max_blocks = max_blocks
        self.epoch = epoch
        self._leases: dict[str, _Lease] = {}
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        handle: MutableBlocks | ImmutableBlocks,
        set_idx: int,
        name: str,
        until_s: float,
        push: Push | None = None,
    ) -> BlockDescriptorList:
        """Grant use of these blocks until `until_s`; the lease takes over the handle.

        `name`: an unguessable name; any holder of it may use the blocks. `push`: they are written
        with the blocks of its names, in this order, and cannot be read; how many there may be is
        the caller's to limit. Raises BlocksetError, and then leaves the handle with the caller.
        """
        listed = described_blocks(handle, self.rank, set_idx, lease=name, epoch=self.epoch)
        with self._lock:
            total = self.leased_blocks(set_idx) + len(handle)
            if push is None and total > self._max_blocks:
                self.counters.refused += 1
                allowed = f"{self._max_blocks} of a set at a time"
                raise BlocksetError("handle", f"{total} blocks leased", allowed, rule="too_many")
            self._leases[name] = _Lease(handle, set_idx, until_s, push)
            self.counters.granted += 1
        return listed

    def leased_blocks(self, set_idx: int | None = None) -> int:
        """Return the number of leased blocks, of one set or of all; shared ones count each time."""
        with self._lock:
            leases = self._leases.values()
            return sum(len(e.handle) for e in leases if set_idx in (None, e.set_idx))

    @contextmanager
    def use(
        self, listed: BlockDescriptorList, now_s: float, *, is_write: bool
    ) -> Iterator[Sequence[int]]:
        """Use blocks under their lease, which may end meanwhile. Raises BlocksetError."""
        with self._lock:
            lease = self._checked(listed, now_s, is_write=is_write)
            lease.users += 1
            if lease.push is not None:
                lease.push.begin(listed.block_indices)
        try:
            yield listed.block_indices
        finally:
            with self._lock:
                lease.users -= 1
                if lease.push is not None:
                    lease.push.being_written.difference_update(listed.block_indices)
                self._release(lease)

    def take_back(self, name: str) -> Handle:
        """End a lease, and return its blocks' handle.

        Raises BlocksetError for a lease that is not live, or is in use.
        """
        with self._lock:
            lease = self._live(name)
            if lease.users:
                raise BlocksetError("lease", "in use", "an unused lease", rule="lease_in_use")
            del self._leases[name]
            self.counters.ended += 1
            return lease.handle

    def pushes(self, connection: object = None) -> tuple[int, int]:
        """Return the number of pushes and of their blocks; of one connection, or of all."""
        with self._lock:
            blocks = [
                len(each.handle)
                for each in self._leases.values()
                if each.push is not None and connection in (None, each.push.connection)
            ]
            return len(blocks), sum(blocks)

    def note_written(
        self, listed: BlockDescriptorList, checksums: Mapping[int, int], until_s: float
    ) -> None:
        """Record the checksums of blocks that were written under a lease.

        New blocks of a push extend it to `until_s`. Raises BlocksetError for a lease that has ended
        meanwhile: what was written is of no use.
        """
        with self._lock:
            push = (lease := self._live(listed.lease)).push
            if push is not None:
                if not push.arrived.issuperset(checksums):
                    lease.until_s = max(lease.until_s, until_s)
                push.arrived.update(checksums)
                push.checksums |= checksums

    def take_written(self, name: str, now_s: float) -> Written:
        """End a push, and return its leading written blocks; the others are released.

        Raises BlocksetError for a lease of no push, and for one that is not live, or is in use.
        """
        with self._lock:
            lease = self._live(name)
            if lease.push is None:
                raise BlocksetError("lease", "not of a push", "that of a push", rule="not_a_push")
            if now_s >= lease.until_s:
                raise BlocksetError("lease", "expired", "one that is not", rule="lease_expired")
            handle, push = self.take_back(name), lease.push
        assert isinstance(handle, MutableBlocks)
        blocks = list(takewhile(push.checksums.__contains__, handle.block_ids))
        written, rest = handle.split(len(blocks))
        rest.release()
        return Written(written, push.names[: len(blocks)], [push.checksums[b] for b in blocks])

    def end(self, name: str) -> None:
        """End a lease of blocks to read, or a push, because its recipient needs it no more.

        Without effect for one that has ended, and for other blocks to write: their owner takes them
        back.
        """
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and (lease.push or isinstance(lease.handle, ImmutableBlocks)):
                self.revoke(name)
                self.counters.ended += lease.push is None
                self.counters.abandoned += lease.push is not None

    def leave(self, connection: object) -> None:
        """End the pushes of a connection that has ended."""
        with self._lock:
            for name, lease in list(self._leases.items()):
                if lease.push is not None and lease.push.connection is connection:
                    self.end(name)

    def revoke(self, name: str) -> None:
        """End a lease, and release its blocks; repeated calls have no effect."""
        with self._lock:
            lease = self._leases.pop(name, None)
            if lease is not None:
                lease.has_ended = True
                self._release(lease)

    def close(self) -> None:
        """End all leases."""
        with self._lock:
            for name in list(self._leases):
                self.revoke(name)

    def expire(self, now_s: float) -> int:
        """End expired leases; return their number."""
        with self._lock:
            over = [name for name, lease in self._leases.items() if now_s >= lease.until_s]
            for name in over:
                self.revoke(name)
            self.counters.expired += len(over)
            return len(over)

    def _live(self, name: str) -> _Lease:
        lease = self._leases.get(name)
        if lease is None:
            allowed = "one that was granted, and has not ended"
            raise BlocksetError("lease", "unknown", allowed, rule="lease_unknown")
        return lease

    def _checked(self, listed: BlockDescriptorList, now_s: float, *, is_write: bool) -> _Lease:
        if (listed.rank, listed.epoch) != (self.rank, self.epoch):
            reason = f"worker {listed.rank}, epoch {listed.epoch}"
            allowed = f"worker {self.rank}, epoch {self.epoch}"
            raise BlocksetError("epoch", reason, allowed, rule="other_epoch")
        lease = self._live(listed.lease)
        if now_s >= lease.until_s:
            raise BlocksetError("lease", "expired", "one that is not", rule="lease_expired")
        if lease.push is not None and not is_write:
            raise BlocksetError("lease", "of a push", "blocks that have names", rule="not_readable")
        if is_write and not isinstance(lease.handle, MutableBlocks):
            raise BlocksetError("mutability", "immutable", "mutable blocks", rule="immutable")
        if is_write and len(set(listed.block_indices)) < len(listed.block_indices):
            rule = "duplicate_destination_blocks"
            raise BlocksetError("block_indices", "one twice", "each block once", rule=rule)
        leased = set(lease.handle.block_ids)
        if listed.block_set_idx != lease.set_idx or not leased.issuperset(listed.block_indices):
            allowed = f"{sorted(leased)} of set {lease.set_idx}"
            reason = f"{list(listed.block_indices)} of set {listed.block_set_idx}"
            raise BlocksetError("block_indices", reason, allowed, rule="not_leased")
        if lease.push is not None and not lease.push.being_written.isdisjoint(listed.block_indices):
            reason, allowed = "some are written already", "one write of a block at a time"
            raise BlocksetError("block_indices", reason, allowed, rule="being_written")
        return lease

    def _release(self, lease: _Lease) -> None:
        if lease.has_ended and not lease.users and lease.handle.is_live:
            lease.handle.release()

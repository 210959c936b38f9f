"""The tier that workers share: blocks in a Redis, sealed with their checksums.

    store: leased? ─▶ sealed ─▶ put        another worker's lease, or its block: left be
    load:  got ─▶ checksum ─▶ an outcome a block; a wrong one is removed for everybody

What others do there is not known here: a block may be gone whenever it is asked for. One that this
worker stored, or found when it wanted to, is told (`take_changes`) until it is gone.
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from torch import Tensor
from xxhash import xxh3_64_intdigest

from router.block_errors import StorageError
from worker_agent.blocks.changes import Change
from worker_agent.blocks.names import IDENTITY_BYTES, BlockName
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.storage.remote import (
    SEAL_BYTES,
    Lease,
    RemoteSettings,
    RemoteStorage,
    Sealed,
)
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.checksums import checksum
from worker_agent.transfer.hops import batches_of, inward, outward
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.measuring import measured
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.told import ToldNames

T = TypeVar("T")

_Put: TypeAlias = Callable[[Sequence[bytes], Sequence[Sealed]], list[StorageError | None]]

BATCH_BYTES = 16 * 1024 * 1024
MAX_BATCH_BLOCKS = 64
"""Go in one pipeline, each of whose answers is waited for."""
LEFT_ALONE_S = 5.0
"""A store that did not answer is not asked again for so long: everything fails at once instead."""

_OF_LEASE = {
    Lease.GRANTED: Outcome.FAILED,  # until it is put
    Lease.ALREADY_STORED: Outcome.KNOWN,
    Lease.LEASED: Outcome.BUSY,
}


class RemoteTier:
    """Calls block for as long as the client's timeouts allow: for a thread, one at a time."""

    __slots__ = (
        "_alone_until_s",
        "_batch_blocks",
        "_clock",
        "_io",
        "_settings",
        "_storage",
        "_told",
        "counters",
    )

    def __init__(
        self,
        storage: RemoteStorage,
        settings: RemoteSettings,
        *,
        io: IoThreads | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`io`: what comes is proven while other blocks travel. `clock`: the time that all workers
        share, in seconds.
        """
        self.counters = TierCounters()
        self._storage = storage
        self._settings = settings
        self._io = io
        self._clock = clock
        self._batch_blocks = max(min(BATCH_BYTES // settings.block_bytes, MAX_BATCH_BLOCKS), 1)
        self._told = ToldNames(settings.max_blocks, settings.ttl_s)
        self._alone_until_s = 0.0

    @property
    def num_blocks(self) -> int:
        """Room, in blocks of all workers."""
        return self._settings.max_blocks

    @property
    def is_kept(self) -> bool:
        """Always."""
        return True

    @property
    def status(self) -> PoolStatus:
        """As far as it is known here: blocks that were told of are kept, the others room."""
        return PoolStatus(0, len(self._told), self.num_blocks - len(self._told))

    @property
    def is_down(self) -> bool:
        """Whether the store did not answer a moment ago."""
        return self._clock() < self._alone_until_s

    def store(self, names: Sequence[BlockName], rows: Tensor, priority: int = 0) -> list[Outcome]:
        """Keep blocks that no worker has stored, nor is storing."""
        del priority
        identities = [name.identity for name in names]
        leases = self._asked(lambda: self._storage.lease(identities))
        if leases is None:
            self.counters.failed += len(names)
            return [Outcome.FAILED] * len(names)
        outcomes = [
            _OF_LEASE[each] if isinstance(each, Lease) else Outcome.FAILED for each in leases
        ]
        granted = [place for place, each in enumerate(leases) if each is Lease.GRANTED]
        put = self._put(identities, rows, granted, self._put_counted)
        for place, outcome in zip(granted, put, strict=True):
            outcomes[place] = outcome
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome in {Outcome.DONE, Outcome.KNOWN}:
                self._told.tell(name, self._clock())
        self.counters.stored += outcomes.count(Outcome.DONE)
        self.counters.failed += outcomes.count(Outcome.FAILED)
        return outcomes

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[Outcome]:
        """Copy blocks into rows; each is proven, for it came over a network."""
        del is_sampled
        outcomes = self._get(identities, rows)
        gone = {Outcome.MISSING, Outcome.CORRUPT}
        pairs = list(zip(identities, outcomes, strict=True))
        self._told.untell([identity for identity, outcome in pairs if outcome in gone])
        corrupt = [identity for identity, outcome in pairs if outcome is Outcome.CORRUPT]
        if corrupt:
            self._asked(lambda: self._storage.remove(corrupt))
        self.counters.loaded += outcomes.count(Outcome.DONE)
        self.counters.failed += outcomes.count(Outcome.FAILED)
        self.counters.corrupt += len(corrupt)
        return outcomes

    def find(self, names: Sequence[BlockName]) -> int:
        """Which of these are there, by whichever worker: they are told as stored, the others as
        gone. How many; none while the store does not answer.
        """
        found = self._asked(lambda: self._storage.has([name.identity for name in names]))
        if found is None:
            return 0
        pairs = list(zip(names, found, strict=True))
        for name in [name for name, is_there in pairs if is_there]:
            self._told.tell(name, self._clock())
        self._told.untell([name.identity for name, is_there in pairs if not is_there])
        return sum(found)

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Nothing: what a former life stored is everybody's."""
        del rows, until_s
        yield from ()

    def probe(self, rows: Tensor) -> TierProbe | None:
        """How fast it is, on blocks of random names; None if it fails. `rows`: written and read."""
        identities = [os.urandom(IDENTITY_BYTES) for _ in range(len(rows))]
        probe = measured(
            rows,
            lambda: self._put(identities, rows, range(len(rows)), self._storage.put_briefly),
            lambda count: self._get(identities[:count], rows),
        )
        self._asked(lambda: self._storage.remove(identities))
        return probe

    def touch(self, identities: Sequence[bytes]) -> None:
        """They stay as long as if they had been stored now."""
        if not identities:
            return
        self._asked(lambda: self._storage.touch(identities, self._clock()))
        self._told.tell_again(identities, self._clock())

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Nobody is to find these; none is reset while the store does not answer."""
        were = self._asked(lambda: self._storage.remove(identities)) if identities else []
        if were is None:
            return ResetOutcome([], [], list(identities))
        self._told.untell(identities)
        pairs = list(zip(identities, were, strict=True))
        return ResetOutcome(
            [identity for identity, was_there in pairs if was_there],
            [identity for identity, was_there in pairs if not was_there],
            [],
        )

    def reset(self) -> None:
        """Nobody uses what is here: the same as `clear`."""
        self.clear()

    def clear(self) -> None:
        """Nobody is to find anything of this model."""
        self._asked(self._storage.clear)
        self._told.clear()

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        return self._told.take_changes(self._clock())

    def close(self) -> None:
        """The blocks stay."""
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
    ) -> list[Outcome]:
        sealed: dict[int, list[Sealed]] = {}

        def seal(batch: range, turn: int) -> None:
            sealed[turn] = [_closed(rows[places[each]]) for each in batch]

        def put(batch: range, turn: int) -> list[Outcome]:
            chosen = [identities[places[each]] for each in batch]
            errors = self._noting(lambda: stored_by(chosen, sealed[turn]))
            return [Outcome.FAILED if error else Outcome.DONE for error in errors]

        # Not on the I/O thread: with a Redis beside it on two cores, checksums that were made
        # meanwhile took the server's core (0.45 of a plain pipeline, and 0.7 so).
        return outward(None, batches_of(len(places), self._batch_blocks), seal, put)

    def _get(self, identities: Sequence[bytes], rows: Tensor) -> list[Outcome]:
        def get(batch: range, _: int) -> list[Sealed | StorageError | None]:
            return self._noting(lambda: self._storage.get(identities[batch.start : batch.stop]))

        def prove(
            batch: range, _: int, sealed: list[Sealed | StorageError | None]
        ) -> list[Outcome]:
            return [_opened(each, rows[place]) for each, place in zip(sealed, batch, strict=True)]

        if self.is_down:
            return [Outcome.FAILED] * len(identities)
        return inward(self._io, batches_of(len(identities), self._batch_blocks), get, prove)

    def _asked(self, call: Callable[[], T]) -> T | None:
        """What the store answers; None if it does not, or is left alone."""
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


def _closed(row: Tensor) -> Sealed:
    """A block beside its seal; its bytes stay where they are."""
    return Sealed(row.numpy().data, checksum(row).to_bytes(SEAL_BYTES, "little"))


def _opened(sealed: Sealed | StorageError | None, row: Tensor) -> Outcome:
    """A block taken out of its seal, if that is right."""
    if sealed is None:
        return Outcome.MISSING
    if isinstance(sealed, StorageError):
        return Outcome.FAILED
    data = memoryview(sealed.data)
    seal = xxh3_64_intdigest(data).to_bytes(SEAL_BYTES, "little")
    if data.nbytes != row.numel() or seal != sealed.seal:
        return Outcome.CORRUPT
    row.numpy().data[:] = data
    return Outcome.DONE

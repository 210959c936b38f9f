"""An index in shards, each changed by a thread of its own.

    caller ─▶ bounded queue ─▶ thread ─▶ Indexer     ranks of some workers
           ─▶ bounded queue ─▶ thread ─▶ Indexer     ranks of others

Changes are posted. A question waits until all that was posted before it is applied; then the
caller's own thread asks the idle shards, because handing it over takes longer than answering it.
There is one caller, the thread of the event loop. It alone can end a shard's idleness, so whoever
reads or changes an index is alone with it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import astuple

from router.indexer.base import (
    DONE,
    HeldBlocks,
    HeldSlice,
    HeldSummary,
    Indexer,
    IndexStats,
    Overlap,
    OverlapScores,
)
from router.indexer.shard import Shard, apply_all
from router.protocol.events import EventBatch, unpack_events
from router.protocol.values import HashArray, PerTier, Rank, Tier

QUEUE_LIMIT = 1024


class _Worker(Struct, eq=False):
    """Where the blocks of a worker's ranks are; `ranks`: those that may hold or have staged any."""

    shard: Shard
    ranks: set[Rank]


class ConcurrentIndex:
    """Ranks spread over several indexes; implements `Indexer` for one calling thread.

    All ranks of a worker are in one shard: the one with fewest workers when the first stores or
    stages, until `clear` was called for all of them. Changes return at once, and True; a full queue
    makes the caller wait for room (`full_waits` counts that). A refusal, like a check, ends in
    `take_differing`, late: the rank may have been healed since. Arrays are kept until applied.
    An exception in a thread makes every call from then on raise a RuntimeError from it.
    """

    __slots__ = (
        "_differing",
        "_failure_is_known",
        "_failures",
        "_is_closed",
        "_queue_limit",
        "_shards",
        "_workers",
        "full_waits",
    )

    def __init__(
        self, make_index: Callable[[], Indexer], shards: int, queue_limit: int = QUEUE_LIMIT
    ) -> None:
        assert shards > 0
        assert queue_limit > 0
        self.full_waits = 0
        self._queue_limit = queue_limit
        self._differing: deque[Rank] = deque()
        self._failures: list[BaseException] = []
        self._workers: dict[int, _Worker] = {}
        self._failure_is_known = self._is_closed = False
        indexes = [make_index() for _ in range(shards)]
        self._shards = [Shard(index, self._differing, self._failures) for index in indexes]

    def expect(self, ranks: int) -> None:
        """Every shard makes room for its part of them."""
        for index in self._indexes():
            index.expect(-(-ranks // len(self._shards)))

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that the rank holds these blocks in this tier."""
        shard = self._worker(rank).shard
        self._post(shard, shard.index.store, rank, tier, sequence_hashes)
        return True

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that it no longer does; blocks it does not hold there are passed over."""
        shard = self._shard(rank)
        self._post(shard, shard.index.remove, rank, tier, sequence_hashes)
        return True

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Note that the rank holds nothing in this tier; None: in any."""
        shard = self._shard(rank)
        self._post(shard, shard.index.clear, rank, tier)
        if tier is None:
            self._forget(rank)

    def apply(
        self,
        rank: Rank,
        batch: EventBatch,
        progress: int,  # noqa: ARG002 - nothing is left to go on from
        room_blocks: int,  # noqa: ARG002 - the caller does not wait
    ) -> int:
        """Apply all events of a batch; DONE at once. Raises WireError for malformed ones.

        Posted as a whole: one hand-over, and one pass without the GIL.
        """
        unpack_events(batch.packed, batch.event_count)  # the thread could not tell the caller
        shard = self._worker(rank).shard
        self._post(shard, apply_all, rank, shard.index, batch)
        return DONE

    def stage(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet."""
        shard = self._worker(rank).shard
        shard.staged.add(rank)
        self._post(shard, shard.index.stage, rank, tier, sequence_hashes)
        return True

    def commit_staged(self, rank: Rank) -> None:
        """What was staged is now what the rank holds, and nothing else."""
        shard = self._shard(rank)
        self._post(shard, shard.index.commit_staged, rank)
        shard.staged.discard(rank)

    def drop_staged(self, rank: Rank) -> None:
        """Forget what was staged."""
        shard = self._shard(rank)
        self._post(shard, shard.index.drop_staged, rank)
        shard.staged.discard(rank)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Note in which cumulative tiers searches may jump; see `Indexer`."""
        shard = self._shard(rank)
        self._post(shard, shard.index.note_holes, rank, holes)

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the outcome will be in `take_differing`."""
        shard = self._shard(rank)
        self._post(shard, shard.index.check, rank, expected)

    def take_differing(self) -> list[Rank]:
        """Ranks that a check found to differ, or that were refused room; waits for none."""
        self._raise_failure()
        taken = [self._differing.popleft() for _ in range(len(self._differing))]
        return list(dict.fromkeys(taken))

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix of a prompt, per rank and cumulative tier."""
        found = [index.find_matches(sequence_hashes) for index in self._indexes()]
        found = [scores for scores in found if len(scores)]
        if len(found) == 1:
            return found[0]
        merged: dict[Rank, Overlap] = {}
        for scores in found:
            merged.update(scores.items())
        return merged

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds."""
        shard = self._shard(rank)
        self._settle(shard)
        return shard.index.summary(rank)

    def dump(self) -> Iterator[HeldBlocks]:
        """Everything held as of now, by shard, rank and tier."""
        return iter([held for index in self._indexes() for held in index.dump()])

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Everything held, shard by shard in slices; waits before each until the shard is idle."""
        for shard in self._shards:
            self._settle(shard)
            for part in shard.index.dump_slices():
                yield part
                self._settle(shard)

    def block_count(self) -> int:
        """Blocks kept; one that is kept in several shards counts as often."""
        return sum(index.block_count() for index in self._indexes())

    def stats(self) -> IndexStats:
        """Sums over the shards."""
        each = (astuple(index.stats()) for index in self._indexes())
        return IndexStats(*map(sum, zip(*each, strict=True)))

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of every shard; False once nothing is left to do in any."""
        are_left = [index.sweep(sub_tables) for index in self._indexes()]
        return any(are_left)

    def flush(self) -> None:
        """Wait until all that was posted is applied."""
        self._settle(*self._shards)

    def close(self) -> None:
        """Stop the threads; drops what they have not applied. Raises what was not raised yet."""
        if self._is_closed:
            return
        self._is_closed = True
        for shard in self._shards:
            shard.stop()
        for shard in self._shards:
            shard.join()
        for shard in self._shards:
            shard.index.close()
        if self._failures and not self._failure_is_known:
            self._raise_failure()

    def _indexes(self) -> list[Indexer]:
        """Those of all shards, idle until the next change is posted."""
        self._settle(*self._shards)
        return [shard.index for shard in self._shards]

    def _settle(self, *shards: Shard) -> None:
        self._raise_failure()
        for shard in shards:
            shard.wait(0)
        self._raise_failure()

    def _post(
        self, shard: Shard, method: Callable[..., object], rank: Rank, *arguments: object
    ) -> None:
        self._raise_failure()
        if shard.pending() >= self._queue_limit:
            self.full_waits += 1
            shard.wait(self._queue_limit - 1)
        shard.post(method, rank, arguments)

    def _raise_failure(self) -> None:
        if self._failures:
            self._failure_is_known = True
            raise RuntimeError("a shard of the index failed") from self._failures[0]
        if self._is_closed:
            raise RuntimeError("the index is closed")

    def _shard(self, rank: Rank) -> Shard:
        """The one of its worker; of a worker that has none any will do: none holds its blocks."""
        worker = self._workers.get(rank.worker_id)
        return self._shards[0] if worker is None else worker.shard

    def _worker(self, rank: Rank) -> _Worker:
        worker = self._workers.get(rank.worker_id)
        if worker is None:
            shard = min(self._shards, key=attrgetter("workers"))
            shard.workers += 1
            worker = self._workers[rank.worker_id] = _Worker(shard, set())
        worker.ranks.add(rank)
        return worker

    def _forget(self, rank: Rank) -> None:
        worker = self._workers.get(rank.worker_id)
        if worker is None or rank in worker.shard.staged:
            return
        worker.ranks.discard(rank)
        if not worker.ranks:
            worker.shard.workers -= 1
            del self._workers[rank.worker_id]

"""An index in shards, each changed by a thread of its own.

    caller ─▶ bounded queue ─▶ thread ─▶ Indexer     ranks of some workers
           ─▶ bounded queue ─▶ thread ─▶ Indexer     ranks of others

Changes are posted. A query waits until all that was posted before it is applied; then the caller's
own thread queries the idle shards, because a hand-over would take longer than the query. There is
one caller, the thread of the event loop. It alone posts work to an idle shard, so that reads and
changes of an index never run concurrently.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import astuple

from router.errors import WireError
from router.indexer.base import (
    DONE,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    Indexer,
    IndexStats,
    Overlap,
    OverlapScores,
    SearchedTree,
)
from router.indexer.shard import Shard, apply_all
from router.protocol.events import Cleared, EventBatch, Removed, Stored, unpack_events
from router.protocol.hybrid import Layout
from router.protocol.values import HashArray, PerTier, Rank, Tier

QUEUE_LIMIT = 1024


class _ShardThread(Struct, eq=False):
    """Shard of a worker, and those of its ranks that may hold blocks or have some staged."""

    shard: Shard
    ranks: set[Rank]


class ConcurrentIndex:
    """Ranks spread over several indexes; implements `Indexer` for one calling thread.

    All ranks of a worker are in one shard: the one with fewest workers when the first stores or
    stages, until `clear` was called for all of them. Changes return True at once; a full queue
    blocks the caller until it has room (counted in `full_waits`). Refusals and failed checks
    appear later, in `take_differing`: the rank may have been healed since. Arrays are kept until
    applied. After an exception in a thread, every call raises a RuntimeError caused by it.
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
        self._workers: dict[int, _ShardThread] = {}
        self._failure_is_known = self._is_closed = False
        indexes = [make_index() for _ in range(shards)]
        self._shards = [Shard(index, self._differing, self._failures) for index in indexes]

    def expect(self, ranks: int) -> None:
        """Prepare every shard for its part of the ranks."""
        for index in self._indexes():
            index.expect(-(-ranks // len(self._shards)))

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Record that the rank holds these blocks in this tier."""
        shard = self._worker(rank).shard
        self._post(shard, shard.index.store, rank, tier, sequence_hashes)
        return True

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Remove these blocks of the rank from this tier; blocks it does not hold are ignored."""
        shard = self._shard(rank)
        self._post(shard, shard.index.remove, rank, tier, sequence_hashes)
        return True

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Remove all blocks of the rank from this tier; None: from all tiers."""
        shard = self._shard(rank)
        self._post(shard, shard.index.clear, rank, tier)
        if tier is None:
            self._forget(rank)

    def apply(
        self,
        rank: Rank,
        batch: EventBatch,
        progress: int,  # noqa: ARG002 - always 0: every batch is posted whole
        room_blocks: int,  # noqa: ARG002 - the caller does not wait
    ) -> int:
        """Post all events of a batch; returns DONE at once. Raises WireError if malformed.

        The batch is posted as a whole: one hand-over, and one pass without the GIL.
        """
        _check_events(batch)  # raises here: the thread could not
        shard = self._worker(rank).shard
        self._post(shard, apply_all, rank, shard.index, batch)
        return DONE

    def stage(self, rank: Rank, place: int, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet."""
        shard = self._worker(rank).shard
        shard.staged.add(rank)
        self._post(shard, shard.index.stage, rank, place, sequence_hashes)
        return True

    def commit_staged(self, rank: Rank, layout: Layout | None = None) -> None:
        """Replace all that the rank holds by the staged blocks."""
        shard = self._shard(rank)
        self._post(shard, shard.index.commit_staged, rank, layout)
        shard.staged.discard(rank)

    def drop_staged(self, rank: Rank) -> None:
        """Drop the staged blocks."""
        shard = self._shard(rank)
        self._post(shard, shard.index.drop_staged, rank)
        shard.staged.discard(rank)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Record in which cumulative tiers searches may jump; see `Indexer`."""
        shard = self._shard(rank)
        self._post(shard, shard.index.note_holes, rank, holes)

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the result will be in `take_differing`."""
        shard = self._shard(rank)
        self._post(shard, shard.index.check, rank, expected)

    def take_differing(self) -> list[Rank]:
        """Return, and clear, the ranks found to differ or refused for lack of room.

        Does not wait for pending changes.
        """
        self._raise_failure()
        taken = [self._differing.popleft() for _ in range(len(self._differing))]
        return list(dict.fromkeys(taken))

    @property
    def trees(self) -> tuple[SearchedTree, ...]:
        """The trees of all shards, which stay as they are until the next change is posted."""
        return tuple(chain.from_iterable(index.trees for index in self._indexes()))

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Return the longest held prefix of a prompt, per rank and cumulative tier."""
        return _joined([index.find_matches(sequence_hashes) for index in self._indexes()])

    def resumable(
        self, sequence_hashes: HashArray, isl_tokens: int, block_size: int
    ) -> OverlapScores:
        """Return the prefix of a prompt that ranks need not compute again; see `Indexer`."""
        each = (
            index.resumable(sequence_hashes, isl_tokens, block_size) for index in self._indexes()
        )
        return _joined(list(each))

    def summary(self, rank: Rank) -> HeldSummary:
        """Return the number and digest of the rank's blocks."""
        shard = self._shard(rank)
        self._settle(shard)
        return shard.index.summary(rank)

    def dump(self) -> Iterator[ExportedBlocks]:
        """Return all blocks held now, by shard, rank and tier."""
        return iter([held for index in self._indexes() for held in index.dump()])

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Yield all held blocks in slices, by shard; waits before each until the shard is idle."""
        return self._slices(lambda index: index.dump_slices())

    def dump_class_slices(self) -> Iterator[HeldSlice]:
        """Yield the blocks of hybrid ranks' classes like `dump_slices`, class c as tier c."""
        return self._slices(lambda index: index.dump_class_slices())

    def stats(self) -> IndexStats:
        """Return the sums over the shards."""
        each = (astuple(index.stats()) for index in self._indexes())
        return IndexStats(*map(sum, zip(*each, strict=True)))

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of every shard. Returns False once nothing is left in any."""
        are_left = [index.sweep(sub_tables) for index in self._indexes()]
        return any(are_left)

    def flush(self) -> None:
        """Wait until all posted changes are applied."""
        self._settle(*self._shards)

    def close(self) -> None:
        """Stop the threads and drop pending changes. Raises a failure that was not raised yet."""
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
        """Return the indexes of all shards, idle until the next change is posted."""
        self._settle(*self._shards)
        return [shard.index for shard in self._shards]

    def _slices(self, dump: Callable[[Indexer], Iterator[HeldSlice]]) -> Iterator[HeldSlice]:
        for shard in self._shards:
            self._settle(shard)
            for part in dump(shard.index):
                yield part
                self._settle(shard)

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
        """Return the shard of the rank's worker; any shard if it has none: no shard holds it."""
        worker = self._workers.get(rank.worker_id)
        return self._shards[0] if worker is None else worker.shard

    def _worker(self, rank: Rank) -> _ShardThread:
        worker = self._workers.get(rank.worker_id)
        if worker is None:
            shard = min(self._shards, key=attrgetter("workers"))
            shard.workers += 1
            worker = self._workers[rank.worker_id] = _ShardThread(shard, set())
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


def _joined(found: list[OverlapScores]) -> OverlapScores:
    """Return the results of several shards, which have different ranks, as one."""
    found = [scores for scores in found if len(scores)]
    if len(found) == 1:
        return found[0]
    merged: dict[Rank, Overlap] = {}
    for scores in found:
        merged.update(scores.items())
    return merged


def _check_events(batch: EventBatch) -> None:
    """Raise WireError if the events are malformed, or of classes that the rank does not have."""
    classes = 0 if batch.hybrid is None else len(batch.hybrid.layout.classes)
    for event in unpack_events(batch.packed, batch.event_count):
        if isinstance(event, Stored | Removed | Cleared):
            continue
        if event.class_index >= classes:
            raise WireError(f"class {event.class_index} (allowed: below {classes})")

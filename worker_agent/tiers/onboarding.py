"""Onboarding: the leading blocks of prompts, each loaded from the fastest tier that has it.

load ─▶ faster than computing? ─▶ batches ─▶ tiers' threads ─▶ loaded, or lost ─▶ a slower tier

Sources of the leading blocks of one prompt, fastest first; without I/O.

    host ─ disk ─ another worker's memory ─ the shared remote store
Sources that certainly hold a block come before those that may hold it.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby, takewhile

import torch
from torch import Tensor

from worker_agent.offload.load_or_recompute import LoadOrRecompute
from worker_agent.tiers.level import BlockSource, Levels, WorkingLevel
from worker_agent.tiers.worker import Spent, TierJob
from worker_agent.transfer.plan import BlockResult, leading
from worker_agent.transfer.slots import aligned_rows


class SourceOrder:
    """Sources of the blocks of one prompt; an index into `givers` is called a rung.

    `identities`: identities of the prompt's leading blocks. `peer`: a worker that has the first
    `peer_blocks` of them.
    """

    __slots__ = ("_held", "_identities", "_peer", "_peer_blocks", "givers")

    def __init__(
        self,
        tiers: Levels,
        identities: Sequence[bytes],
        peer: BlockSource | None = None,
        peer_blocks: int = 0,
    ) -> None:
        levels: list[BlockSource] = [level for level in tiers.levels if not level.is_shared]
        shared: list[BlockSource] = [level for level in tiers.levels if level.is_shared]
        self.givers = [*levels, *([] if peer is None else [peer]), *shared]
        self._held = tiers.held
        self._identities = identities
        self._peer = peer
        self._peer_blocks = peer_blocks

    def runs(self, start: int, stop: int, below: int = -1) -> Iterator[tuple[int, range]]:
        """Yield rungs below `below` with the range of places that each may have, from `start` on.

        A place belongs to the highest rung that may have it. Ends at the first place that no rung
        has. O(blocks × rungs).
        """
        places = range(start, stop)
        for rung, group in groupby(places, lambda place: self._highest(place, below)):
            if rung is None:
                return
            run = list(group)
            yield rung, range(run[0], run[-1] + 1)

    def _highest(self, place: int, below: int) -> int | None:
        held = self._held.tiers(self._identities[place])
        for rung in range(below + 1, len(self.givers)):
            if self._may_have(self.givers[rung], place, held):
                return rung
        return None

    def _may_have(self, giver: BlockSource, place: int, held: int) -> bool:
        if giver is self._peer:
            return place < self._peer_blocks and not giver.worker.is_broken
        assert isinstance(giver, WorkingLevel)
        return bool(held & giver.bit) or (giver.is_shared and not giver.worker.is_broken)


class Load(StrEnum):
    """State of a block that is to be loaded."""

    WAITING = "waiting"
    LOADED = "loaded"
    LOST = "lost"
    """No tier has it, or none could return it as it was stored."""
    LATE = "late"
    """It was not loaded before the deadline."""
    CANCELLED = "cancelled"
    """The load was cancelled, or a block before it is missing."""


class Loading:
    """A load of leading blocks.

    `rows[i]`, (n, block bytes) on the host, is the block of `identities[i]`, for i < `loaded`,
    verified to be what was stored under that identity; of blocks from host memory only a sample is
    verified. Belongs to the stack's owner.

    Invariant: `loaded` is the number of leading blocks loaded; it never decreases.
    """

    __slots__ = ("_end", "deadline_s", "identities", "in_flight", "is_whole", "loaded", "outcomes",
                 "rows")  # fmt: skip

    def __init__(
        self, identities: Sequence[bytes], rows: Tensor, deadline_s: float, *, is_whole: bool
    ) -> None:
        """Begin a load. `is_whole`: the blocks are usable only if all of them are loaded."""
        self.identities = identities
        self.rows = rows
        self.deadline_s = deadline_s
        self.is_whole = is_whole
        self.outcomes = [Load.WAITING] * len(identities)
        self.loaded = 0
        self.in_flight = 0
        """Calls to tiers that may still write into `rows`, at or behind `loaded`."""
        self._end = len(identities)

    @property
    def is_done(self) -> bool:
        """True if no further block will be loaded."""
        return self.loaded == self._end

    @property
    def usable_blocks(self) -> int:
        """Number of leading blocks that may be used once the load is done."""
        return self.loaded if not self.is_whole or self.loaded == len(self.identities) else 0

    def wants(self, place: int) -> bool:
        """Return whether the block at this place is still needed."""
        return place < self._end

    def came(self, start: int, count: int) -> None:
        """Mark `count` blocks from `start` on as loaded."""
        for place in range(start, min(start + count, self._end)):
            self.outcomes[place] = Load.LOADED
        while self.loaded < self._end and self.outcomes[self.loaded] is Load.LOADED:
            self.loaded += 1

    def lost(self, place: int) -> None:
        """Mark the block at `place` as lost.

        The blocks behind it are cancelled; with `is_whole` those before it too, except the loaded
        leading blocks.
        """
        if self.wants(place):
            self.outcomes[place] = Load.LOST
            self._end_at(self.loaded if self.is_whole else place, Load.CANCELLED)

    def late(self) -> None:
        """End the load because its deadline has passed."""
        self._end_at(self.loaded, Load.LATE)

    def cancel(self) -> None:
        """End the load because its result is no longer needed."""
        self._end_at(self.loaded, Load.CANCELLED)

    def _end_at(self, place: int, reason: Load) -> None:
        self._end = min(self._end, place)
        for later in range(place, len(self.outcomes)):
            if self.outcomes[later] in {Load.WAITING, Load.LOADED}:
                self.outcomes[later] = reason


_FAILURES = (BlockResult.FAILED, BlockResult.CORRUPT)

TRIED_EVERY = 64
"""Period of trial loads: one in this many prompts refused by the estimate is loaded in part."""


class Onboarding:
    """Loads in progress.

    Invariant: each load still waits for a block or has calls in flight.
    """

    __slots__ = ("_loadings", "_refused", "_tiers", "_worth")

    def __init__(self, tiers: Levels, worth: LoadOrRecompute | None) -> None:
        self._tiers = tiers
        self._worth = worth
        self._loadings: list[Loading] = []
        self._refused = 0

    @property
    def is_waited_for(self) -> bool:
        """True if a load still waits for a block."""
        return any(not loading.is_done for loading in self._loadings)

    def load(
        self,
        identities: Sequence[bytes],
        now_s: float,
        timeout_s: float,
        *,
        is_whole: bool,
        peer: BlockSource | None = None,
        peer_blocks: int = 0,
    ) -> Loading | None:
        """See `TierStack.load`. `peer`: a worker that also has the first `peer_blocks` blocks."""
        ladder = SourceOrder(self._tiers, identities, peer, peer_blocks)
        blocks = min(self._room_blocks, len(identities))
        count = self._worth_loading(ladder, blocks, timeout_s) or self._tried(ladder, blocks)
        if not count or (is_whole and count < len(identities)):
            return None
        rows = _host_rows(count, self._tiers.settings.block_bytes)
        loading = Loading(identities[:count], rows, now_s + timeout_s, is_whole=is_whole)
        self._loadings.append(loading)
        self._fetch(loading, ladder, 0, count)
        return loading

    def loadable(self, identities: Sequence[bytes], timeout_s: float) -> int:
        """See `TierStack.loadable`."""
        known = takewhile(self._tiers.held.tiers, identities[: self._room_blocks])
        ladder = SourceOrder(self._tiers, identities)
        return self._worth_loading(ladder, sum(1 for _ in known), timeout_s)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Measured rate of prefill; None if not yet measured, or if no estimate is configured."""
        return None if self._worth is None else self._worth.prefill_tokens_per_s

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """Add a measurement: `tokens` prompt tokens were computed in `busy_s`."""
        if self._worth is not None:
            self._worth.note_prefill(tokens, busy_s)

    def end_late(self, now_s: float) -> None:
        """End the loads past their deadline; blocks not loaded by then are not loaded."""
        for loading in self._loadings:
            if now_s >= loading.deadline_s and not loading.is_done:
                loading.late()
        self._loadings = [each for each in self._loadings if each.in_flight or not each.is_done]

    def wait_s(self, now_s: float) -> float | None:
        """Return the time until the next deadline, or None if no load waits."""
        waits = [each.deadline_s - now_s for each in self._loadings if not each.is_done]
        return max(min(waits), 0.0) if waits else None

    def cancel(self) -> None:
        """Cancel all loads."""
        for loading in self._loadings:
            loading.cancel()

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring, after `end_late`."""
        assert all(each.in_flight or not each.is_done for each in self._loadings)

    def _worth_loading(self, ladder: SourceOrder, blocks: int, timeout_s: float) -> int:
        count = 0
        for rung, run in ladder.runs(0, blocks):
            speed, worth = ladder.givers[rung].speed, self._worth
            wanted = len(run) if worth is None else worth.blocks_to_load(speed, len(run), timeout_s)
            count += wanted
            if wanted < len(run):
                break
        return count

    def _tried(self, ladder: SourceOrder, blocks: int) -> int:
        """Return the size of a trial batch, or 0.

        One in `TRIED_EVERY` refused prompts is loaded in part, so that a tier measured as slow is
        measured again.
        """
        run = next(ladder.runs(0, blocks), None)
        if run is None:
            return 0
        self._refused += 1
        return 0 if self._refused % TRIED_EVERY else min(len(run[1]), self._batch_blocks)

    @property
    def _room_blocks(self) -> int:
        """Number of further blocks that may be loaded at once."""
        loading_blocks = sum(len(loading.identities) for loading in self._loadings)
        return max(self._tiers.settings.max_loading_blocks - loading_blocks, 0)

    @property
    def _batch_blocks(self) -> int:
        return self._tiers.settings.batch_blocks

    def _fetch(
        self, loading: Loading, ladder: SourceOrder, start: int, stop: int, below: int = -1
    ) -> None:
        """Load blocks, each from the first rung of `ladder` after `below` that may have it."""
        reached = start
        for rung, run in ladder.runs(start, stop, below):
            for first in range(run.start, run.stop, self._batch_blocks):
                last = min(first + self._batch_blocks, run.stop)
                if not self._fetch_batch(loading, ladder, range(first, last), rung):
                    loading.lost(first)
                    return
            reached = run.stop
        if reached < stop:
            loading.lost(reached)

    def _fetch_batch(self, loading: Loading, ladder: SourceOrder, places: range, rung: int) -> bool:
        giver, (start, stop) = ladder.givers[rung], (places.start, places.stop)
        identities, rows = loading.identities[start:stop], loading.rows[start:stop]
        size_bytes = rows.numel()
        is_first = not giver.speed.queued_bytes

        def run() -> Sequence[BlockResult]:
            if not loading.wants(start):
                return []
            return giver.store.load(identities, rows, is_sampled=giver.is_sampled)

        def then(outcomes: Sequence[BlockResult] | None, spent: Spent) -> None:
            giver.speed.queued_bytes -= size_bytes
            loading.in_flight -= 1
            came = leading(outcomes or [])
            giver.up.count(came, rows.shape[1], spent.busy_s)
            if came:
                giver.speed.note(came, spent.waited_s if is_first else 0.0, spent.busy_s)
            loading.came(start, came)
            if start + came < stop and loading.wants(start + came):
                giver.up.failed += not outcomes or outcomes[came] in _FAILURES
                self._fetch(loading, ladder, start + came, stop, below=rung)

        if not giver.worker.submit(TierJob(run, then), is_load=True):
            return False
        giver.speed.queued_bytes += size_bytes
        loading.in_flight += 1
        return True


def _host_rows(count: int, block_bytes: int) -> Tensor:
    """Return host rows that the next copy takes directly.

    They are pinned if there is a CUDA device, otherwise aligned for direct disk reads.
    """
    if torch.cuda.is_available():
        with torch.inference_mode(mode=False):  # See aligned_rows.
            return torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=True)
    return aligned_rows(count, block_bytes)

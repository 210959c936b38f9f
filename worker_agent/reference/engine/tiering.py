"""The use of the tiers below the device in a step.

before   take the tiers' results ─▶ loaded bytes go into blocks, which are registered
admit    blocks of a prompt in the tiers are requested; that request waits, the others do not
after    newly registered blocks are offered; due ones are gathered and handed over
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import Struct

from worker_agent.blocks.changes import BlockStored, Change
from worker_agent.blocks.pool import BlockPool
from worker_agent.reference.engine.batching import Batcher, Running
from worker_agent.reference.engine.cache import CacheLayout, CacheRows
from worker_agent.tiers.onboarding import Loading
from worker_agent.tiers.stack import TierChange, TierStack
from worker_agent.transfer.physical import PhysicalLayout


class RankMemory(Struct, frozen=True):
    """The memory of a rank's blocks: its pool, its device memory, and the tiers below."""

    pool: BlockPool
    physical: PhysicalLayout
    stack: TierStack


class _Coming(Struct, frozen=True):
    """A request that waits for blocks."""

    running: Running
    loading: Loading


class EngineTiers:
    """The link between a stack of tiers and an engine's batches, for the engine's thread only.

    Invariant: device memory is read and written between steps only.
    """

    __slots__ = ("_batcher", "_coming", "_loaded_tokens", "_pool", "_rows", "_timeout_s", "stack")

    def __init__(
        self,
        memory: RankMemory,
        batcher: Batcher,
        layout: CacheLayout,
        load_timeout_s: float,
    ) -> None:
        """Set up the link; blocks missing after `load_timeout_s` are computed."""
        self.stack = memory.stack
        self._pool = memory.pool
        self._batcher = batcher
        self._rows = CacheRows(memory.physical, layout)
        self._timeout_s = load_timeout_s
        self._coming: list[_Coming] = []
        self._loaded_tokens = 0

    def poll(self, now_s: float) -> list[TierChange]:
        """Take the tiers' results before a step. Returns changes of block names in the tiers."""
        is_decoding = any(running.is_decoding for running in self._batcher.running)
        changes = self.stack.poll(now_s, is_decoding=is_decoding)
        coming, self._coming = self._coming, []
        for each in coming:
            if not each.running.is_loading:  # the request was aborted
                each.loading.cancel()
            elif each.loading.is_done:
                self._take(each)
            else:
                self._coming.append(each)
        return changes

    def begin(self, admitted: Sequence[Running], now_s: float) -> None:
        """Request blocks of admitted requests from the tiers.

        Their blocks on the device are marked as used in the tiers below, to be kept there.
        """
        for running in admitted:
            self.stack.touch([name.identity for name in running.names[: running.registered]])
            names = self._batcher.reusable(running)
            identities = [name.identity for name in names]
            source = running.request.source
            source = None if source is None else source.behind(running.registered)
            loading = self.stack.load(identities, now_s, self._timeout_s, source=source)
            if loading is not None:
                running.is_loading = True
                self._coming.append(_Coming(running, loading))

    def loadable(self, identities: Sequence[bytes]) -> int:
        """Return the number of leading blocks that would be loaded if requested now."""
        return self.stack.loadable(identities, self._timeout_s)

    def store(self, changes: Sequence[Change], computed: Iterable[Running], now_s: float) -> None:
        """Offer the blocks registered in a step of these requests, and store those due."""
        priorities = {
            name.identity: running.request.priority
            for running in computed
            if running.request.priority
            for name in running.names
        }
        stored = (each.name for each in changes if isinstance(each, BlockStored))
        for priority, names in groupby(stored, lambda name: priorities.get(name.identity, 0)):
            self.stack.offer(list(names), priority)
        self._hand_over(now_s)

    def _hand_over(self, now_s: float) -> None:
        while waiting := self.stack.due(now_s):
            blocks = self._pool.scan(each.name.identity for each in waiting)
            here = [i for i, block in enumerate(blocks) if block is not None]
            if here:
                rows = self._rows.gathered([block for block in blocks if block is not None])
                self.stack.store([waiting[i] for i in here], rows)

    def note_prefill(self, tokens: int, busy_s: float) -> None:
        """Record the time of `tokens` computed prompt tokens, to compare it with loading."""
        self.stack.note_prefill(tokens, busy_s)

    def take_loaded_tokens(self) -> int:
        """Return the prompt tokens loaded from the tiers since the last call."""
        loaded, self._loaded_tokens = self._loaded_tokens, 0
        return loaded

    def clear(self) -> None:
        """Clear every tier."""
        self.stack.clear()

    def drain(self) -> int:
        """Store queued blocks for tiers that outlive this process. Blocking.

        No step may follow. Returns the number of blocks given up.
        """
        return self.stack.drain(self._hand_over)

    def wait_s(self, now_s: float) -> float | None:
        """Return the longest time until the next step. Returns None if the tiers end it."""
        if any(each.loading.is_done for each in self._coming):
            return 0.0
        return self.stack.wait_s(now_s)

    def _take(self, each: _Coming) -> None:
        running, count = each.running, each.loading.usable_blocks
        if count:
            blocks = running.blocks[running.registered : running.registered + count]
            self._rows.scatter(each.loading.rows[:count], blocks)
        before = running.computed
        self._batcher.loaded(running, count)
        self._loaded_tokens += running.computed - before

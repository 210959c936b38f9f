"""What a rank's step has to do with the tiers below its device.

before   take in what tiers did ─▶ what has come up goes into blocks, and is named
admit    what tiers have of a prompt is asked for; the request waits, the others do not
after    what was named is offered; what is due is gathered, and handed over
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from worker_agent.blocks.changes import BlockStored, Change
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.sources import PeerSource
from worker_agent.engine.batching import Batcher, Running
from worker_agent.engine.cache import CacheLayout, CacheRows
from worker_agent.tiers.loading import Loading
from worker_agent.tiers.stack import TierChange, TierStack
from worker_agent.transfer.physical import PhysicalLayout


class RankMemory(Struct, frozen=True):
    """What a rank's blocks lie in: its pool, its memory, and the tiers below."""

    pool: BlockPool
    physical: PhysicalLayout
    stack: TierStack


class _Coming(Struct, frozen=True):
    """A request that waits for blocks."""

    running: Running
    loading: Loading


class EngineTiers:
    """The glue between a stack of tiers and an engine's batches; the engine's thread alone.

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
        """`load_timeout_s`: beyond, what has not come is computed."""
        self.stack = memory.stack
        self._pool = memory.pool
        self._batcher = batcher
        self._rows = CacheRows(memory.physical, layout)
        self._timeout_s = load_timeout_s
        self._coming: list[_Coming] = []
        self._loaded_tokens = 0

    def poll(self, now_s: float) -> list[TierChange]:
        """Before a step: what happened to names in the tiers."""
        is_decoding = any(running.is_decoding for running in self._batcher.running)
        changes = self.stack.poll(now_s, is_decoding=is_decoding)
        coming, self._coming = self._coming, []
        for each in coming:
            if not each.running.is_loading:  # it was aborted
                each.loading.cancel()
            elif each.loading.is_done:
                self._take(each)
            else:
                self._coming.append(each)
        return changes

    def begin(self, admitted: Sequence[Running], now_s: float) -> None:
        """Requests were admitted: ask for what the tiers have of them; what the device has of them
        is used, and to be kept below as well.
        """
        for running in admitted:
            self.stack.touch([name.identity for name in running.names[: running.registered]])
            names = self._batcher.reusable(running)
            identities = [name.identity for name in names]
            source = _behind(running.request.source, running.registered)
            loading = self.stack.load(identities, now_s, self._timeout_s, source=source)
            if loading is not None:
                running.is_loading = True
                self._coming.append(_Coming(running, loading))

    def loadable(self, identities: Sequence[bytes]) -> int:
        """How many leading blocks would be loaded, were they asked for now."""
        return self.stack.loadable(identities, self._timeout_s)

    def store(self, changes: Sequence[Change], computed: Iterable[Running], now_s: float) -> None:
        """After a step of these: offer what was named in it, and hand over what is due."""
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
        """So many prompt tokens were computed: what loading is measured against."""
        self.stack.note_prefill(tokens, busy_s)

    def take_loaded_tokens(self) -> int:
        """Prompt tokens that came from the tiers since the last call."""
        loaded, self._loaded_tokens = self._loaded_tokens, 0
        return loaded

    def clear(self) -> None:
        """Every tier forgets everything."""
        self.stack.clear()

    def drain(self) -> int:
        """No step follows: store what waits, as far as it outlives this process; how many blocks
        were given up. Blocking.
        """
        return self.stack.drain(self._hand_over)

    def wait_s(self, now_s: float) -> float | None:
        """How long at most until the next step; None: until there are news."""
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


def _behind(source: PeerSource | None, blocks: int) -> PeerSource | None:
    """The same of the blocks behind those that the device has."""
    return None if source is None else replace(source, blocks=source.blocks - blocks)

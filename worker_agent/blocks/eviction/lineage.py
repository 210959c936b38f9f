"""Eviction of leaves: blocks that no other unused block follows.

Of the leaves, the one of the lowest priority goes first, and of equals the one released first. A
prefix is useful without its suffix, but a suffix is useless without its prefix. So a prompt is
evicted from its end, and no block is kept that no prompt can reach. This is the default of host and
disk. Source: `Lineage` of Dynamo's second block manager, which has no priorities.

    a ── b ── c        leaves: c, e        c was released before e: c goes, and b becomes a leaf
         └─── e                            once e is gone too, at the time of its own release

Blocks are released a prompt at a time. Such a *run* of consecutive blocks is kept as one: only its
last block can be a leaf. Where another run branches off, or continues, the block before it waits
until that run is gone.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

from worker_agent.blocks.eviction.base import Unused, check_count

_MIN_STALE = 64

_Turn: TypeAlias = tuple[int, int]
"""A leaf's priority and release tick: the lowest goes first."""


class _Run:
    """Consecutive blocks, in prompt order.

    `entry`: the number of its entry in the heap; None while other runs follow its last block.
    """

    __slots__ = ("blocks", "entry", "unused")

    def __init__(self, blocks: list[int], unused: list[Unused]) -> None:
        self.blocks = blocks
        self.unused = unused
        self.entry: int | None = None


class LineageEviction:
    """Eviction of leaves. O(log runs) per run, and O(1) per block in it.

    Invariants: a block is in one run. `_followers` counts the runs that follow a block. A run is in
    the heap, by the priority and release tick of its last block, or waits because runs follow it.
    Stale entries of the heap are skipped when they come up, and their number is bounded.
    """

    __slots__ = ("_entries", "_followers", "_heap", "_run_of", "_waiting")

    def __init__(self) -> None:
        self._run_of: dict[int, _Run] = {}
        self._followers: dict[bytes, int] = {}
        self._waiting: dict[bytes, _Run] = {}
        self._heap: list[tuple[_Turn, int, _Run]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._run_of)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Add blocks in runs, each as long as a block is followed by the one released before it."""
        start = 0
        for end in range(1, len(blocks) + 1):
            is_end = end == len(blocks)
            if is_end or unused[end].name.identity != unused[end - 1].name.parent_identity:
                # Blocks are released last first; a run is kept in prompt order.
                self._add_run(list(blocks[start:end][::-1]), list(unused[start:end][::-1]))
                start = end
        self._drop_stale()

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are in use again. Raises KeyError."""
        left = list(blocks)
        while left:
            run = self._run_of[left[0]]
            start = run.blocks.index(left[0])
            pairs = zip(left, run.blocks[start:], strict=False)
            count = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if count is None:
                count = min(len(left), len(run.blocks) - start)
            self._cut(run, start, start + count)
            del left[:count]
        self._drop_stale()

    def pop(self, count: int) -> list[int]:
        """Remove and return the next leaves, one by one. Raises KeyError if there are fewer."""
        check_count(self, count)
        popped: list[int] = []
        while len(popped) < count:
            _, entry, run = heappop(self._heap)
            if entry == run.entry:
                popped += self._pop_from(run, count - len(popped))
        for block in popped:
            del self._run_of[block]
        self._drop_stale()
        return popped

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Do nothing: only releases count here."""

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring."""
        runs = {id(run): run for run in self._run_of.values()}.values()
        assert sum(len(run.blocks) for run in runs) == len(self._run_of)
        entries = {entry for _, entry, run in self._heap if entry == run.entry}
        heads = [run.unused[0].name.parent_identity for run in runs]
        assert self._followers == {each: heads.count(each) for each in heads if each is not None}
        for run in runs:
            assert all(self._run_of[block] is run for block in run.blocks)
            names = [unused.name for unused in run.unused]
            assert all(b.parent_identity == a.identity for a, b in pairwise(names))
            waits = run.entry is None and self._waiting[names[-1].identity] is run
            assert waits or run.entry in entries
            assert not waits or names[-1].identity in self._followers
        assert len(self._waiting) == sum(run.entry is None for run in runs)
        assert len(self._heap) <= 2 * len(self._run_of) + _MIN_STALE

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _pop_from(self, run: _Run, count: int) -> list[int]:
        """Remove blocks from a run's end, until another run's leaf is due before."""
        blocks, unused = run.blocks, run.unused
        parent = unused[0].name.parent_identity
        next_turn = self._heap[0][0] if self._heap else None
        popped: list[int] = []
        while len(popped) < count and unused:
            last = unused[-1]
            if last.name.identity in self._followers:
                break
            if next_turn is not None and _turn(last) > next_turn:
                break
            unused.pop()
            popped.append(blocks.pop())
        run.entry = None
        if unused:
            self._place(run)
        else:
            self._lose_follower(parent)
        return popped

    def _add_run(self, blocks: list[int], unused: list[Unused]) -> None:
        run = _Run(blocks, unused)
        self._run_of.update(dict.fromkeys(blocks, run))
        parent = unused[0].name.parent_identity
        if parent is not None:
            self._followers[parent] = self._followers.get(parent, 0) + 1
        self._place(run)

    def _cut(self, run: _Run, start: int, end: int) -> None:
        """Split a run: the blocks of these positions are in use again.

        The blocks before them, and those after them, become runs of their own.
        """
        blocks, unused = run.blocks, run.unused
        for block in blocks[start:end]:
            del self._run_of[block]
        first, last = unused[0].name.parent_identity, unused[end - 1].name.identity
        before = blocks[:start], unused[:start]
        self._unplace(run)
        del blocks[:end], unused[:end]
        if before[0]:
            self._add_run(*before)
        if blocks:
            self._followers[last] = self._followers.get(last, 0) + 1
            self._place(run)
        self._lose_follower(first)

    def _place(self, run: _Run) -> None:
        """Put a run into the heap, or let it wait if other runs follow its last block."""
        last = run.unused[-1]
        if last.name.identity in self._followers:
            run.entry = None
            self._waiting[last.name.identity] = run
            return
        self._entries += 1
        run.entry = self._entries
        heappush(self._heap, (_turn(last), run.entry, run))

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._run_of) + _MIN_STALE:
            self._heap = [each for each in self._heap if each[1] == each[2].entry]
            heapify(self._heap)

    def _unplace(self, run: _Run) -> None:
        if run.entry is None:
            del self._waiting[run.unused[-1].name.identity]
        run.entry = None

    def _lose_follower(self, parent: bytes | None) -> None:
        """Record that a run that followed a block is gone."""
        if parent is None:
            return
        left = self._followers[parent] - 1
        if left:
            self._followers[parent] = left
            return
        del self._followers[parent]
        waiting = self._waiting.pop(parent, None)
        if waiting is not None:
            self._place(waiting)


def _turn(leaf: Unused) -> _Turn:
    return leaf.priority, leaf.returned_tick

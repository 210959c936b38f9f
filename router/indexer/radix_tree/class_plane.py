"""The blocks of hybrid ranks beside full attention: a second tree, linked to the first's holders.

rank ──▶ holder ──▶ counts, …, address of the layout's words, holder in the second tree
                                                                 │
sequence hash ──▶ reference in the second tree ──▶ holders, each with a mask of classes
"""

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from router.indexer.radix_tree import _holder_sets
from router.indexer.radix_tree._block_table import Words
from router.indexer.radix_tree._stepwise_kernel import (
    ALIGNMENT,
    CHUNK,
    CLASS_WORDS,
    CLASSES,
    FIRST_CLASS,
    FULL_SIZE,
    IS_FULL_EAGLE,
    IS_STEPWISE,
    LAYOUT_WORDS,
    STATE,
    TAIL,
    WINDOW,
)
from router.indexer.radix_tree.holders import Holders
from router.protocol.hybrid import LayerClass, Layout
from router.protocol.values import HashArray, Rank, Tier

if TYPE_CHECKING:
    from router.indexer.radix_tree.radix_tree import RadixTree

_KINDS = {"window": WINDOW, "state": STATE, "chunk": CHUNK, "tail": TAIL}
_CLASS_HOLDER, _LAYOUT = int(_holder_sets.CLASS_HOLDER), int(_holder_sets.LAYOUT)


class ClassPlane:
    """The layouts of a tree's hybrid ranks, and the blocks of their classes.

    `tree` holds the blocks, with class c as tier c. `layouts`: those of the ranks. Owns the columns
    `CLASS_HOLDER` and `LAYOUT` of the first tree's holders, and its word `CLASS_TREE`.
    """

    __slots__ = ("_holders", "_state", "_words", "layouts", "tree")

    def __init__(self, state: Words, holders: Holders, tree: "RadixTree") -> None:
        self._state = state
        self._holders = holders
        self._words: dict[Layout, Words] = {}
        self.layouts: dict[Rank, Layout] = {}
        self.tree = tree

    def prepare(self, rank: Rank, layout: Layout) -> bool:
        """Set the rank's layout, and make room for changes of its blocks. False: there is none."""
        if self.layouts.get(rank) != _shape(layout):
            self._set_layout(rank, layout)
        has_room = self.tree.ready(rank) is not None
        self.link(rank)
        return has_room

    def forget(self, rank: Rank) -> None:
        """Remove a rank, which is hybrid no longer; its staged blocks stay. Others are ignored."""
        if rank in self.layouts:
            self._set_layout(rank, None)
            self.clear(rank)

    def clear(self, rank: Rank, class_index: int | None = None) -> None:
        """Remove all blocks of the rank from this class; None: from all. O(1), swept later."""
        self.tree.clear(rank, None if class_index is None else Tier(class_index))
        self.link(rank)

    def stage(self, rank: Rank, class_index: int, sequence_hashes: HashArray) -> bool:
        """Collect blocks of a class that will replace all that the rank holds."""
        return self.tree.stage(rank, Tier(class_index), sequence_hashes)

    def commit_staged(self, rank: Rank, layout: Layout) -> None:
        """Replace the layout, and all that the classes hold by the staged blocks."""
        self._set_layout(rank, layout)
        self.tree.commit_staged(rank)
        self.link(rank)

    def link(self, rank: Rank) -> None:
        """Write where kernels find the rank's layout and blocks, after a change of its holders."""
        self._state[_holder_sets.CLASS_TREE] = self.tree.address if self.layouts else 0
        holder = self._holders.ids.get(rank)
        if holder is not None:
            row = self._holders.rows[holder]
            row[_LAYOUT], row[_CLASS_HOLDER] = self._links(rank)

    def check_invariants(self) -> None:
        """Assert that the links are right, and the invariants of the tree. O(its size)."""
        self.tree.check_invariants()
        assert set(self._words) == set(self.layouts.values()), "layouts"
        assert set(self.tree.holders.ids) <= set(self.layouts), "blocks without a layout"
        for rank, holder in self._holders.ids.items():
            row = self._holders.rows[holder].tolist()
            assert (row[_LAYOUT], row[_CLASS_HOLDER]) == self._links(rank), "links"

    def _links(self, rank: Rank) -> tuple[int, int]:
        layout, holder = self.layouts.get(rank), self.tree.holders.ids.get(rank)
        if layout is None:
            return 0, 0
        return int(self._words[layout].ctypes.data), 0 if holder is None else holder + 1

    def _set_layout(self, rank: Rank, layout: Layout | None) -> None:
        """Set the layout of a rank; None: it has none. O(ranks) if it is another one."""
        before = self.layouts.pop(rank, None)
        if layout is not None:
            layout = _shape(layout)
            self.layouts[rank] = layout
            if layout not in self._words:
                self._words[layout] = layout_words(layout)
        if before is not None and before not in self.layouts.values():
            del self._words[before]


def _shape(layout: Layout) -> Layout:
    """Return a layout without its problem, which makes no difference to a search."""
    return replace(layout, problem="") if layout.problem else layout


def layout_words(layout: Layout) -> Words:
    """Return a layout as kernels read it."""
    words = np.zeros(LAYOUT_WORDS, np.uint64)
    words[ALIGNMENT], words[FULL_SIZE] = layout.alignment_tokens, layout.full_block_tokens
    words[IS_FULL_EAGLE], words[CLASSES] = layout.is_full_eagle, len(layout.classes)
    words[IS_STEPWISE] = _is_stepwise(layout)
    for c, each in enumerate(layout.classes):
        first = FIRST_CLASS + c * CLASS_WORDS
        parts = (_KINDS[each.kind], each.block_tokens, each.span_tokens, each.is_eagle)
        words[first : first + CLASS_WORDS] = parts
    return words


def _is_stepwise(layout: Layout) -> bool:
    """Return whether hits of this layout are more than a number of blocks in a row per class."""
    sizes = [layout.full_block_tokens, *(each.block_tokens for each in layout.classes)]
    are_aligned = all(size and layout.alignment_tokens % size == 0 for size in sizes)
    return not are_aligned or any(_needs_steps(layout, each) for each in layout.classes)


def _needs_steps(layout: Layout, each: LayerClass) -> bool:
    """Return whether no walk can serve a class; of states it serves all."""
    is_alone = len(layout.classes) == 1 and each.block_tokens == layout.alignment_tokens
    if each.kind == "chunk":
        return each.is_eagle or not is_alone or each.span_tokens % each.block_tokens != 0
    if each.kind == "window":
        return each.span_tokens == 1 or (each.is_eagle and not is_alone)
    return each.kind == "tail"

"""The prompts in service, as a trie of runs of blocks with counts of the requests that share them.

    root ─ [system prompt: 40 blocks] ─┬─ [12 blocks]          a prompt ends where a node ends
                                       └─ [3 blocks] ─ [2 …]   a node splits where prompts part

A sequence hash identifies its whole path, so two runs part at the first position where their hashes
differ, which bisection finds. A prompt of any length is therefore added, looked up and removed in
as many steps as it has nodes, usually one to three: booking 512 blocks costs as much as booking
one.

All counts are per slot (`RankTable`): a block counts once for a slot, however many of its requests
hold it; a block that a single request of a slot holds may weigh less than a whole block.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.values import HashArray

SlotDepths: TypeAlias = npt.NDArray[np.float64]

MICRO = 1_000_000
"""The weight of a whole block. Weights are in millionths, so that sums stay exact."""


class Node:
    """A run of blocks: positions `[start, end)` of `hashes`, shared by every prompt through it.

    `requests`: the number of requests per slot that pass through. `weights`: for slots with one
    such request, the weight of a block if it is not MICRO. `ends`: the number of requests of any
    slot that end here.
    """

    __slots__ = (
        "_slots",
        "children",
        "end",
        "ends",
        "hashes",
        "parent",
        "requests",
        "start",
        "weights",
    )

    def __init__(self, parent: "Node | None", hashes: HashArray, start: int, end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.end = end
        self.ends = 0
        self.children: dict[int, Node] = {}
        self.requests: dict[int, int] = {}
        self.weights: dict[int, int] = {}
        self._slots: npt.NDArray[np.intp] | None = None

    @property
    def slots(self) -> npt.NDArray[np.intp]:
        """The slots with requests; kept until one comes or goes."""
        if self._slots is None:
            self._slots = np.fromiter(self.requests, np.intp, len(self.requests))
        return self._slots

    def enter(self, slot: int) -> int:
        """Count a request of a slot; return how many it had before."""
        before = self.requests.get(slot, 0)
        self.requests[slot] = before + 1
        if not before:
            self._slots = None
        return before

    def leave(self, slot: int) -> int:
        """Uncount a request of a slot; return how many it has left."""
        left = self.requests[slot] - 1
        if left:
            self.requests[slot] = left
        else:
            del self.requests[slot]
            self._slots = None
        return left

    @property
    def blocks(self) -> int:
        """The length of the run."""
        return self.end - self.start


class Change(Struct, frozen=True, gc=False):
    """The effect of adding or removing a prompt on its slot.

    `blocks`: distinct blocks added or removed; `discount_micro`: millionths of discount that ended.
    """

    blocks: int
    discount_micro: int


class PromptTrie:
    """The trie of all slots' prompts.

    Invariants: a node's run is not empty, and its hashes equal its children's up to its end; a slot
    is in a node if and only if it is in a child or a request of it ends there, and its counts add
    up; only slots with one request have weights; a node in which no request ends has two children,
    or one with different weights. `_searched` is set from `write_depths` to the next change: its
    prompt, the last node that shares a block with it, and the shared end.
    """

    __slots__ = ("_root", "_searched")

    def __init__(self) -> None:
        self._root = Node(None, np.empty(0, np.uint64), 0, 0)
        self._searched: tuple[HashArray, Node, int] | None = None

    def add(self, slot: int, hashes: HashArray) -> tuple[Node, Change]:
        """Add a prompt of a slot; return its last node and the change. Keeps the array.

        O(nodes on its path · log blocks).
        """
        node, position = self._root, 0
        searched, self._searched = self._searched, None
        if searched is not None and searched[0] is hashes:  # as when it is booked at once
            node, position = searched[1:]
        elif len(hashes) and int(hashes[0]) in node.children:
            *_, (node, position) = self._way(hashes)
        if position < node.end:
            node = _split(node, position)
        if position < len(hashes):
            parent, node = node, Node(node, hashes, position, len(hashes))
            parent.children[int(hashes[position])] = node
        node.ends += 1
        change = _enter(slot, node)
        if change.discount_micro:  # runs may be split for their weights alone
            _tidy(node)
        return node, change

    def remove(self, slot: int, end: Node) -> Change:
        """Remove a prompt of a slot that ends at `end`; return the change."""
        self._searched = None
        end.ends -= 1
        blocks = discount_micro = 0
        for node in _upwards(end):
            if not node.leave(slot):
                blocks += node.blocks
                discount_micro += _weigh(node, slot, MICRO)
        _tidy(end)
        return Change(blocks, discount_micro)

    def weigh(self, slot: int, end: Node, weight_micro: int) -> int:
        """Set the weight of every block that a request alone holds; return the discount added.

        A prompt's shared blocks come first on its path, so only the end of the path is weighed.
        """
        self._searched = None
        discount_micro = 0
        for node in _upwards(end):
            if node.requests[slot] != 1:
                break
            discount_micro -= _weigh(node, slot, weight_micro)
        _tidy(end)
        return discount_micro

    def write_depths(self, hashes: HashArray, depths: SlotDepths) -> bool:
        """Write the `depth` of every slot that holds a block of a prompt.

        Other slots are unchanged. Returns False if no slot holds any.
        """
        self._searched = None
        if not len(hashes) or int(hashes[0]) not in self._root.children:
            return False
        for node, end in self._way(hashes):
            depths[node.slots] = end
            self._searched = hashes, node, end
        return True

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        for child in self._root.children.values():
            _check(child)

    def _way(self, hashes: HashArray) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that share a block with a prompt, in order, each with the shared end."""
        node, position = self._root, 0
        while position == node.end and position < len(hashes):
            child = node.children.get(int(hashes[position]))
            if child is None:
                return
            node = child
            position = _shared_end(node, hashes)
            yield node, position


def _split(lower: Node, position: int) -> Node:
    """Split a node in two; return the upper one. The object itself becomes the lower one.

    Requests keep references to the nodes where they end, which is why it stays the lower one.
    """
    parent = lower.parent
    assert parent is not None
    upper = Node(parent, lower.hashes, lower.start, position)
    upper.requests = dict(lower.requests)
    upper.weights = dict(lower.weights)
    parent.children[int(lower.hashes[lower.start])] = upper
    lower.parent, lower.start = upper, position
    upper.children[int(lower.hashes[position])] = lower
    return upper


def _enter(slot: int, end: Node) -> Change:
    blocks = discount_micro = 0
    node, parent = end, end.parent
    while parent is not None:
        if not node.enter(slot):
            blocks += node.end - node.start
        elif slot in node.weights:
            discount_micro += _weigh(node, slot, MICRO)
        node, parent = parent, parent.parent
    return Change(blocks, discount_micro)


def _tidy(end: Node) -> None:
    """Drop the nodes of a path that no request needs, and merge those that need not be two."""
    for node in _upwards(end):
        parent = node.parent
        assert parent is not None
        if not node.requests:
            del parent.children[int(node.hashes[node.start])]
        elif not node.ends and len(node.children) == 1:
            (child,) = node.children.values()
            if child.weights == node.weights:
                child.parent, child.start = parent, node.start
                parent.children[int(node.hashes[node.start])] = child


def _upwards(end: Node) -> list[Node]:
    """Return the nodes of a path, last to first, without the root."""
    way, node = [], end
    while node.parent is not None:
        way.append(node)
        node = node.parent
    return way


def _shared_end(node: Node, hashes: HashArray) -> int:
    """Return the end of a prompt's shared part of a node's run. Its first block must be shared."""
    known, low, high = node.hashes, node.start + 1, min(node.end, len(hashes))
    if known[high - 1] == hashes[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if known[middle] == hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _weigh(node: Node, slot: int, weight_micro: int) -> int:
    """Set the weight of a slot's blocks here; return the increase in millionths."""
    before = node.weights.pop(slot, MICRO)
    if weight_micro != MICRO:
        node.weights[slot] = weight_micro
    return node.blocks * (weight_micro - before)


def _check(node: Node) -> None:
    assert node.blocks > 0
    assert node.requests
    assert all(node.requests[slot] == 1 for slot in node.weights)
    through = dict.fromkeys(node.requests, 0)
    for first, child in node.children.items():
        assert child.parent is node
        assert (child.start, int(child.hashes[child.start])) == (node.end, first)
        assert np.array_equal(child.hashes[: node.end], node.hashes[: node.end])
        for slot, count in child.requests.items():
            through[slot] += count
        _check(child)
    assert sum(node.requests.values()) - sum(through.values()) == node.ends
    assert all(node.requests[slot] >= count for slot, count in through.items())
    if not node.ends and len(node.children) == 1:
        (child,) = node.children.values()
        assert child.weights != node.weights

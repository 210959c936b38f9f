"""The prompts being served, as a trie of runs of blocks: who shares how much with whom.

    root ─ [system prompt: 40 blocks] ─┬─ [12 blocks]          a prompt ends where a node ends
                                       └─ [3 blocks] ─ [2 …]   a node splits where prompts part

A sequence hash names its whole path, so that two runs part at the first position where their hashes
differ, and bisection finds it. A prompt of any length is therefore added, looked up and removed in
as many steps as it has nodes, mostly one to three: booking 512 blocks costs as much as booking one.

Everything is per slot (`RankTable`): a block counts once for a slot however many of its requests
hold it, and one that a single request holds there may weigh less than a whole block.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.values import HashArray

SlotDepths: TypeAlias = npt.NDArray[np.float64]

MICRO = 1_000_000
"""A whole block: weights are kept in millionths, so that sums stay exact."""


class Node:
    """A run of blocks, `[start, end)` of every prompt in `hashes` that comes through.

    `requests`: how many of each slot come through. `weights`: of slots with one such request, where
    it is not a whole block. `ends`: how many requests of any slot end here.
    """

    __slots__ = ("children", "end", "ends", "hashes", "parent", "requests", "start", "weights")

    def __init__(self, parent: "Node | None", hashes: HashArray, start: int, end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.end = end
        self.ends = 0
        self.children: dict[int, Node] = {}
        self.requests: dict[int, int] = {}
        self.weights: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        """Length of the run."""
        return self.end - self.start


class Change(Struct, frozen=True):
    """What a prompt's coming or going did to its slot: distinct blocks that came or went, and
    millionths that blocks weighed less and no longer do.
    """

    blocks: int
    discount_micro: int


class PromptTrie:
    """Invariants: a node's run is not empty, and its hashes equal its children's up to its end; a
    slot is in a node if and only if it is in a child or a request of it ends there, and its
    counts add up; only slots with one request have weights; a node in which no request ends has
    two children, or one whose weights differ.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = Node(None, np.empty(0, np.uint64), 0, 0)

    def add(self, slot: int, hashes: HashArray) -> tuple[Node, Change]:
        """Add a prompt of a slot; where it ends, and the change. Keeps the array.

        O(nodes on its way · log blocks).
        """
        node, position = self._deepest(hashes)
        if position < node.end:
            node = _split(node, position)
        if position < len(hashes):
            parent, node = node, Node(node, hashes, position, len(hashes))
            parent.children[int(hashes[position])] = node
        node.ends += 1
        change = _enter(slot, node)
        if change.discount_micro:  # runs may have been two for their weights alone
            _tidy(node)
        return node, change

    def remove(self, slot: int, end: Node) -> Change:
        """Remove a prompt of a slot that ends there; the change."""
        end.ends -= 1
        blocks = discount_micro = 0
        for node in _upwards(end):
            node.requests[slot] -= 1
            if not node.requests[slot]:
                del node.requests[slot]
                blocks += node.blocks
                discount_micro += _weigh(node, slot, MICRO)
        _tidy(end)
        return Change(blocks, discount_micro)

    def weigh(self, slot: int, end: Node, weight_micro: int) -> int:
        """Give a weight to every block that a request alone holds; how much less they now weigh.

        What it shares comes first on its way, so it is the end of the way that is weighed.
        """
        discount_micro = 0
        for node in _upwards(end):
            if node.requests[slot] != 1:
                break
            discount_micro -= _weigh(node, slot, weight_micro)
        _tidy(end)
        return discount_micro

    def depth(self, slot: int, hashes: HashArray) -> int:
        """How many leading blocks of a prompt the requests of a slot hold."""
        depth = 0
        for node, end in self._way(hashes):
            if slot not in node.requests:
                break
            depth = end
        return depth

    def write_depths(self, hashes: HashArray, depths: SlotDepths) -> bool:
        """The same for every slot; those that hold nothing of it keep what is there. False where
        that is all of them.
        """
        if not len(hashes) or int(hashes[0]) not in self._root.children:
            return False
        for node, end in self._way(hashes):
            requests = node.requests
            depths[np.fromiter(requests, np.intp, len(requests))] = end
        return True

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        for child in self._root.children.values():
            _check(child)

    def _way(self, hashes: HashArray) -> Iterator[tuple[Node, int]]:
        """Nodes that share a block with a prompt, first to last, and up to where they do."""
        node, position = self._root, 0
        while position == node.end and position < len(hashes):
            child = node.children.get(int(hashes[position]))
            if child is None:
                return
            node = child
            position = _shared_end(node, hashes)
            yield node, position

    def _deepest(self, hashes: HashArray) -> tuple[Node, int]:
        if not len(hashes) or int(hashes[0]) not in self._root.children:
            return self._root, 0
        *_, deepest = self._way(hashes)
        return deepest


def _split(lower: Node, position: int) -> Node:
    """Part a node in two; the old object is the lower one, where requests end. The upper one."""
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
    for node in _upwards(end):
        before = node.requests.get(slot, 0)
        node.requests[slot] = before + 1
        if before:
            discount_micro += _weigh(node, slot, MICRO)
        else:
            blocks += node.blocks
    return Change(blocks, discount_micro)


def _tidy(end: Node) -> None:
    """Drop nodes of a way that nobody needs; make those one that need not be two."""
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
    """Nodes of a way, last to first, without the root."""
    way, node = [], end
    while node.parent is not None:
        way.append(node)
        node = node.parent
    return way


def _shared_end(node: Node, hashes: HashArray) -> int:
    """Up to where a prompt goes through a node's run; its first block is known to."""
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
    """Give a slot's blocks here a weight; how many millionths more they weigh now."""
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

"""The KV blocks of one simulated engine: named blocks outlive their requests, nameless ones do not.

A block is *used* by running requests, or *idle*: kept for later requests, and evicted, least
recently used first, when space is needed. Prompts are whole prefixes and are released from their
ends, so the cached blocks of full attention are always closed under prefixes. Blocks of the other
layers of a hybrid model share the space.

Windows and states are cached at checkpoints only, as by vLLM from 0.29 on: at the last boundary
before a prompt's last token, and at a junction, where full attention holds more of the prompt than
could be resumed. A prompt resumes at the last boundary at which full attention, every window and
every state stand. Boundaries are those of a trace's blocks, in which all groups are cached.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from router.protocol.hybrid import LayerClass, Layout
from router.protocol.values import U64_MAX, HashArray

_GROUP_BITS = 64


class BlockCache:
    """The blocks of an engine by name: a sequence hash, or one with a group of layers.

    Invariants: a named block is used or idle, never both; used, idle and nameless blocks together
    fit in `capacity_blocks`. `evicted`: names evicted since the last `take_evicted`.
    """

    __slots__ = ("_idle", "_nameless_blocks", "_uses", "capacity_blocks", "evicted")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nameless_blocks = 0
        self.evicted: list[int] = []

    @property
    def used_blocks(self) -> int:
        """Blocks of running requests, shared ones counted once."""
        return len(self._uses) + self._nameless_blocks

    def __contains__(self, name: int) -> bool:
        """Return whether a block is cached, used or idle."""
        return name in self._uses or name in self._idle

    def matching(self, sequence_hashes: Sequence[int], limit_blocks: int) -> int:
        """Return the number of leading blocks in the cache, up to a limit. O(blocks)."""
        for position, sequence_hash in enumerate(islice(sequence_hashes, limit_blocks)):
            if sequence_hash not in self:
                return position
        return min(len(sequence_hashes), limit_blocks)

    def take(self, matched: Sequence[int], further_blocks: int) -> bool:
        """Use cached blocks and `further_blocks` nameless ones.

        Returns False, without a change, if they do not fit. O(blocks).
        """
        newly_used = sum(each in self._idle for each in matched)
        if self.used_blocks + newly_used + further_blocks > self.capacity_blocks:
            return False
        for name in matched:
            self._use(name)
        self._nameless_blocks += further_blocks
        self._evict()
        return True

    def name(self, names: Sequence[int]) -> None:
        """Give nameless blocks in use these names. They stay in use. O(blocks).

        A second copy of a named block is freed.
        """
        self._nameless_blocks -= len(names)
        for name in names:
            self._use(name)

    def release(self, names: Sequence[int], nameless_blocks: int) -> None:
        """Release named blocks of a request, from their end, and nameless ones. O(blocks)."""
        self._nameless_blocks -= nameless_blocks
        for name in reversed(names):
            uses = self._uses[name] - 1
            if uses:
                self._uses[name] = uses
            else:
                del self._uses[name]
                self._idle[name] = None

    def take_evicted(self) -> list[int]:
        """Return the names evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        assert not self._uses.keys() & self._idle.keys()
        assert all(uses > 0 for uses in self._uses.values())
        assert self._nameless_blocks >= 0
        assert self.used_blocks + len(self._idle) <= self.capacity_blocks

    def _use(self, name: int) -> None:
        self._idle.pop(name, None)
        self._uses[name] = self._uses.get(name, 0) + 1

    def _evict(self) -> None:
        excess = self.used_blocks + len(self._idle) - self.capacity_blocks
        for _ in range(excess):
            self.evicted.append(self._idle.popitem(last=False)[0])


class LayerGroups(Struct, frozen=True, forbid_unknown_fields=True):
    """Groups of layers of one kind and shape, each with blocks as large as full attention's.

    `span_tokens`: of a window; a state has none.
    """

    kind: Literal["window", "state"]
    groups: Annotated[int, Meta(ge=1, le=32)]
    span_tokens: Annotated[int, Meta(ge=0)] = 0

    def blocks_to_resume(self, block_size: int) -> int:
        """Return the blocks before a boundary, of each group, that a prompt needs to resume."""
        return -(-(self.span_tokens - 1) // block_size) if self.kind == "window" else 1


class Checkpoints:
    """The names of the blocks of all groups, and the layout that an agent would publish.

    A block of full attention is named by its sequence hash; one of group g, from 1 on, by that plus
    g · 2⁶⁴. `layout` is None if there are no groups: the model is not hybrid.
    """

    __slots__ = ("_classes", "_needs", "blocks_of_one", "layout", "most_blocks", "running_blocks")

    def __init__(self, layers: Sequence[LayerGroups], block_size: int) -> None:
        self._needs: list[tuple[int, int]] = []
        self._classes = [-1]
        for index, each in enumerate(layers):
            for _ in range(each.groups):
                self._needs.append((len(self._classes), each.blocks_to_resume(block_size)))
                self._classes.append(index)
        self.blocks_of_one = sum(need for _, need in self._needs)
        self.running_blocks = self.blocks_of_one + len(self._needs)
        self.most_blocks = self.running_blocks + 2 * self.blocks_of_one
        classes = tuple(LayerClass(each.kind, block_size, each.span_tokens) for each in layers)
        self.layout = Layout(block_size, block_size, classes) if layers else None

    def names(self, sequence_hashes: Sequence[int], end: int) -> Iterator[int]:
        """Yield the blocks of groups that a prompt needs to resume after its first `end` blocks."""
        for group, need in self._needs:
            for sequence_hash in sequence_hashes[max(end - need, 0) : end]:
                yield sequence_hash + (group << _GROUP_BITS)

    def resumable(self, cache: BlockCache, sequence_hashes: Sequence[int], end: int) -> int:
        """Return the blocks after which a prompt can resume, of which full attention has `end`.

        O(blocks): a boundary without a checkpoint takes one look-up as a rule.
        """
        while end and not all(name in cache for name in self.names(sequence_hashes, end)):
            end -= 1
        return end

    def by_class(self, names: Iterable[int]) -> Iterator[tuple[int, HashArray]]:
        """Yield the classes of the layout that blocks of these names are in, with their hashes.

        A block is named once for each group of its class. Full attention's blocks are left out.
        """
        found: dict[int, dict[int, None]] = {}
        for name in names:
            if name > U64_MAX:
                found.setdefault(self._classes[name >> _GROUP_BITS], {})[name & U64_MAX] = None
        for index, hashes in found.items():
            yield index, np.array(list(hashes), np.uint64)

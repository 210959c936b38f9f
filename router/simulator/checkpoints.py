"""The layers of a hybrid model that are not full attention, and where they let a prompt resume.

Windows and states are cached at checkpoints only, as by vLLM from 0.29 on: at the last boundary
before a prompt's last token, and at a junction, where full attention holds more of the prompt than
could be resumed. A prompt resumes at the last boundary at which full attention, every window and
every state stand. Boundaries are those of a trace's blocks, in which all groups are cached.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from router.protocol.hybrid import LayerClass, Layout
from router.protocol.values import U64_MAX, HashArray
from router.simulator.block_cache import BlockCache

_GROUP_BITS = 64


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

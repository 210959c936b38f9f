"""The blocks of one request: their names, and the engine's blocks that hold them."""

from collections.abc import Sequence
from itertools import chain
from operator import mul
from typing import TypeAlias

from router.errors import InvalidFieldError
from router.sequence.hashing.tokens import TokenBlockSequence
from worker_agent.blocks.names import UNPUBLISHED, BlockName, Naming
from worker_agent.connector.slots.block_groups import BlockGroup, BlockGroups
from worker_agent.connector.slots.errors import RequestKey, SlotOperationError

NO_BLOCK = 0
"""Place of a window's block that the request does not have: vLLM's null block."""

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The engine's blocks of a request in order, for each KV cache group."""


class SlotBlocks:
    """A request's tokens, its block names as far as computed, and the engine's blocks in order."""

    __slots__ = ("_group_names", "_groups", "_naming", "_prefixes", "_root", "device_blocks",
                 "key", "room_tokens", "sequence")  # fmt: skip

    def __init__(
        self,
        key: RequestKey,
        sequence: TokenBlockSequence,
        groups: BlockGroups,
        naming: Naming,
        root: bytes,
    ) -> None:
        """Create it without blocks. `root`: start of the names for its LoRA adapter and salt."""
        self.key = key
        self.sequence = sequence
        self.device_blocks: list[list[int]] = [[] for _ in groups.all]
        self.room_tokens = 0
        """Number of leading tokens that have a place in every group."""
        self._groups = groups
        self._naming = naming
        self._root = root
        self._prefixes: list[BlockName] = []
        self._group_names: list[dict[int, BlockName]] = [{} for _ in groups.all]

    @property
    def last_boundary(self) -> int:
        """The last token at which it could be resumed; at least one is left to be computed."""
        return self._groups.aligned(len(self.sequence) - 1)

    def names(self, group: int, first: int, end: int) -> list[BlockName]:
        """Return the names of a group's full blocks `first` to `end`. O(those not named before)."""
        of_group = self._groups.all[group]
        prefixes = self._prefixes_to(end * of_group.block_size // self._groups.unit)
        if not of_group.tag:
            return prefixes[first:end]
        names = self._group_names[group]
        for index in range(first, end):
            if index not in names:
                names[index] = self._name(group, of_group, index)
        return [names[index] for index in range(first, end)]

    def forget_passed(self, num_computed: int) -> None:
        """Forget the blocks that windows have passed; the engine may use them for other tokens."""
        for index, group in self._groups.windows:
            blocks = self.device_blocks[index]
            passed = min(group.first_needed(num_computed), len(blocks))
            while passed and blocks[passed - 1] != NO_BLOCK:
                passed -= 1
                blocks[passed] = NO_BLOCK

    def extend_device(self, tables: BlockTables) -> None:
        """Extend the engine's blocks to all of `tables`. O(all blocks).

        Raises SlotOperationError if the first of them differ from those it has.
        """
        if tables == self.device_blocks:
            return
        self._check_groups(tables)
        for ours, theirs in zip(self.device_blocks, tables, strict=True):
            self._check_known(ours, theirs[: len(ours)])
        for ours, theirs in zip(self.device_blocks, tables, strict=True):
            if ours != theirs[: len(ours)]:  # One of them has passed blocks of a window.
                ours[:] = map(min, ours, theirs)
        pairs = zip(self.device_blocks, tables, strict=True)
        self.append_device([theirs[len(ours) :] for ours, theirs in pairs])

    def append_device(self, tables: BlockTables) -> None:
        """Append the engine's new blocks of each group. O(all blocks).

        Raises SlotOperationError, without appending any, if one is invalid or repeated.
        """
        if not any(tables):
            return
        self._check_groups(tables)
        new, known = tables[0], self.device_blocks[0]
        if not self._groups.is_single:
            new, known = _present(tables), _present(self.device_blocks)
        distinct = set(new)
        if len(distinct) < len(new) or not distinct.isdisjoint(known):
            raise SlotOperationError(self.key, "blocks", "one of them twice", "each block once")
        if new and min(new) < 0:
            raise SlotOperationError(self.key, "blocks", f"{min(new)}", "0 or above")
        for blocks, more in zip(self.device_blocks, tables, strict=True):
            blocks += more
        self.room_tokens = min(map(mul, map(len, self.device_blocks), self._groups.sizes))

    def clear_device(self) -> None:
        """Forget all of the engine's blocks."""
        self.room_tokens = 0
        for blocks in self.device_blocks:
            blocks.clear()

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append sampled tokens; append none and raise SlotOperationError if one is invalid."""
        try:
            if len(tokens) == 1:  # The usual case while decoding, in half the time.
                self.sequence.append(tokens[0])
            else:
                self.sequence.extend(tokens)
        except InvalidFieldError as error:
            raise SlotOperationError(self.key, "tokens", error.reason, error.allowed) from error

    def _check_groups(self, tables: BlockTables) -> None:
        if len(tables) != len(self.device_blocks):
            allowed = f"{len(self.device_blocks)}"
            raise SlotOperationError(self.key, "blocks", f"of {len(tables)} groups", allowed)

    def _check_known(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Raise SlotOperationError if two blocks differ, unless a window has passed one of them."""
        is_passed = not self._groups.is_single
        differ = ours != theirs and any(
            a != b and not (is_passed and NO_BLOCK in {a, b})
            for a, b in zip(ours, theirs, strict=False)
        )
        if differ or len(theirs) < len(ours):
            allowed = f"those it has ({len(ours)}), and new ones"
            raise SlotOperationError(self.key, "blocks", f"{list(theirs)}", allowed)

    def _prefixes_to(self, end: int) -> list[BlockName]:
        """Return the names of at least the first `end` units of the prompt."""
        known = len(self._prefixes)
        if known < end:
            before = self._prefixes[-1] if known else None
            more = self.sequence.blocks[known:end]
            self._prefixes += self._naming.named(more, self._root, before)
        return self._prefixes

    def _name(self, group: int, of_group: BlockGroup, index: int) -> BlockName:
        """Return the name of a group's block, after the prefix that ends with it."""
        units = of_group.block_size // self._groups.unit
        prefix = self._prefixes[(index + 1) * units - 1]
        identity = self._naming.in_group(prefix, of_group.tag)
        parent = self._prefixes[index * units - 1] if index else None
        above = None if parent is None else self._naming.in_group(parent, of_group.tag)
        if group != self._groups.full[0][0] or units > 1:
            return BlockName(identity, UNPUBLISHED, above)
        return BlockName(identity, prefix.sequence_hash, above, prefix.parent_sequence_hash)


def _present(tables: BlockTables) -> list[int]:
    """Return the blocks of all groups, without those that windows have passed."""
    return [block for block in chain.from_iterable(tables) if block != NO_BLOCK]

"""The blocks of one request: their names, and the engine's blocks that hold them."""

from collections.abc import Sequence

from router.errors import InvalidFieldError
from router.sequence.hashing.tokens import TokenBlockSequence
from worker_agent.blocks.names import BlockName, Naming
from worker_agent.connector.slots.errors import RequestKey, SlotOperationError


class SlotBlocks:
    """A request's tokens, its block names as far as computed, and the engine's blocks in order."""

    __slots__ = ("_names", "_naming", "_root", "device_blocks", "key", "sequence")

    def __init__(
        self, key: RequestKey, sequence: TokenBlockSequence, naming: Naming, root: bytes
    ) -> None:
        """Create it without blocks. `root`: start of the names for its LoRA adapter and salt."""
        self.key = key
        self.sequence = sequence
        self.device_blocks: list[int] = []
        self._naming = naming
        self._root = root
        self._names: list[BlockName] = []

    def names(self, end: int) -> Sequence[BlockName]:
        """Return the names of at least the first `end` full blocks. O(blocks not named before)."""
        known = len(self._names)
        if known < end:
            before = self._names[-1] if known else None
            more = self.sequence.blocks[known:end]
            self._names += self._naming.named(more, self._root, before)
        return self._names

    def append_device(self, blocks: Sequence[int]) -> None:
        """Append the engine's new blocks. O(all blocks).

        Raises SlotOperationError, without appending any, if one is invalid or repeated.
        """
        if not blocks:
            return
        distinct = set(blocks)
        if len(distinct) < len(blocks) or not distinct.isdisjoint(self.device_blocks):
            raise SlotOperationError(self.key, "blocks", "one of them twice", "each block once")
        if min(blocks) < 0:
            raise SlotOperationError(self.key, "blocks", f"{min(blocks)}", "0 or above")
        self.device_blocks += blocks

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append sampled tokens; append none and raise SlotOperationError if one is invalid."""
        try:
            if len(tokens) == 1:  # The usual case while decoding, in half the time.
                self.sequence.append(tokens[0])
            else:
                self.sequence.extend(tokens)
        except InvalidFieldError as error:
            raise SlotOperationError(self.key, "tokens", error.reason, error.allowed) from error

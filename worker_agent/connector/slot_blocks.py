"""The blocks of one request: what they are called, and which of the engine's hold them."""

from collections.abc import Sequence

from router.errors import InvalidFieldError
from router.sequence.tokens import TokenBlockSequence
from router.slot_errors import RequestKey, SlotOperationError
from worker_agent.blocks.names import BlockName, Naming


class SlotBlocks:
    """A request's tokens, named as far as anybody asked, and the engine's blocks in their order."""

    __slots__ = ("_names", "_naming", "_root", "device_blocks", "key", "sequence")

    def __init__(
        self, key: RequestKey, sequence: TokenBlockSequence, naming: Naming, root: bytes
    ) -> None:
        """`root`: where the names of its LoRA and salt begin."""
        self.key = key
        self.sequence = sequence
        self.device_blocks: list[int] = []
        self._naming = naming
        self._root = root
        self._names: list[BlockName] = []

    def names(self, end: int) -> Sequence[BlockName]:
        """Of the first so many full blocks, or more. O(blocks not named before)."""
        known = len(self._names)
        if known < end:
            before = self._names[-1] if known else None
            more = self.sequence.blocks[known:end]
            self._names += self._naming.named(more, self._root, before)
        return self._names

    def append_device(self, blocks: Sequence[int]) -> None:
        """The engine gave it these, too. Raises SlotOperationError, appending none. O(all)."""
        if not blocks:
            return
        distinct = set(blocks)
        if len(distinct) < len(blocks) or not distinct.isdisjoint(self.device_blocks):
            raise SlotOperationError(self.key, "blocks", "one of them twice", "each block once")
        if min(blocks) < 0:
            raise SlotOperationError(self.key, "blocks", f"{min(blocks)}", "0 or above")
        self.device_blocks += blocks

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """They were sampled. Raises SlotOperationError, appending none."""
        try:
            if len(tokens) == 1:  # as always while decoding, in half the time
                self.sequence.append(tokens[0])
            else:
                self.sequence.extend(tokens)
        except InvalidFieldError as error:
            raise SlotOperationError(self.key, "tokens", error.reason, error.allowed) from error

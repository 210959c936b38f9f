"""KV cache groups of an engine, and the blocks of each that a request needs to resume at a token.

    full attention   │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│     all blocks before it
    window           │                 ▒▒▒▒▒▒│     those with the last `window - 1` tokens before it
                     0                       t     t: a multiple of every group's block size

A model with one kind of attention is the case of one group. Source: vLLM's KV cache managers.
"""

from collections.abc import Sequence
from math import gcd, lcm

from msgspec import Struct

from router.errors import InvalidFieldError


class BlockGroup(Struct, frozen=True):
    """Layers that share a block table.

    `window`: tokens of a sliding window; None for full attention. `tag`: all that distinguishes the
    bytes of its blocks from those of other groups; empty if the engine has one group.
    """

    block_size: int
    window: int | None = None
    tag: bytes = b""

    def first_needed(self, tokens: int) -> int:
        """Return the index of the first block needed to resume after `tokens` tokens."""
        if self.window is None:
            return 0
        return max(tokens - self.window + 1, 0) // self.block_size


class BlockGroups:
    """The groups of one engine; immutable.

    `unit`: the block size at which prompts are hashed, which divides that of every group.
    `alignment`: a request can be resumed at multiples of it.
    """

    __slots__ = ("alignment", "all", "full", "is_single", "sizes", "unit", "windows")

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        """Create them. Raises InvalidFieldError for sizes below 1, or if no group is full."""
        for group in groups:
            _check_positive("block_size", group.block_size)
            _check_positive("window", 1 if group.window is None else group.window)
        self.all = tuple(groups)
        numbered = list(enumerate(groups))
        self.full = tuple((index, group) for index, group in numbered if group.window is None)
        """Groups of full attention, each with its index."""
        self.windows = tuple((index, group) for index, group in numbered if group.window)
        if not self.full:
            raise InvalidFieldError("groups", "none of full attention", "at least one")
        tags = {group.tag for group in groups}
        if len(tags) < len(groups) or (len(groups) > 1 and b"" in tags):
            raise InvalidFieldError("tag", "empty or repeated", "another for each group")
        self.is_single = len(groups) == 1
        """True for one group, of which leading blocks are useful without those behind them."""
        self.sizes = tuple(group.block_size for group in groups)
        """Tokens per block of each group."""
        self.unit = gcd(*self.sizes)
        self.alignment = lcm(*self.sizes)

    def aligned(self, tokens: int) -> int:
        """Return the last token, up to `tokens`, at which a request can be resumed."""
        return tokens - tokens % self.alignment


def _check_positive(field: str, value: int) -> None:
    if value < 1:
        raise InvalidFieldError(field, f"{value}", "at least 1 token")

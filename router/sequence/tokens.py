"""A request's tokens cut into blocks as they come, each named the moment it is full.

    append, extend ──▶ PartialTokenBlock ──full──▶ TokenBlock, TokenBlock, …
                            ▲                              │
                            └─── truncate, unwind, pop ────┘

The partial block of a sequence is never full. Source: Dynamo's `lib/tokens`, whose operations and
results these are.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec import Struct

from router.block_errors import (
    InsufficientTokensError,
    TokenBlockEmptyError,
    TokenBlockFullError,
    TokenBlockIncompleteError,
)
from router.errors import InvalidFieldError
from router.protocol.values import U32_MAX
from router.sequence.block_families import BlockNames, Families


class TokenBlock(Struct, frozen=True):
    """A full block of a sequence; `position` counts the blocks before it."""

    tokens: tuple[int, ...]
    position: int
    routed: BlockNames
    salted: BlockNames
    families: Families

    def next_block(self) -> "PartialTokenBlock":
        """The empty block after this one."""
        return PartialTokenBlock(len(self.tokens), self.families, self)


class PartialTokenBlock:
    """The block that grows, after `parent`."""

    __slots__ = ("_families", "_parent", "_tokens", "block_size")

    def __init__(
        self,
        block_size: int,
        families: Families,
        parent: TokenBlock | None = None,
        tokens: Iterable[int] = (),
    ) -> None:
        self.block_size = block_size
        self._families = families
        self._parent = parent
        self._tokens = list(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are here, in order."""
        return tuple(self._tokens)

    @property
    def remaining(self) -> int:
        """How many tokens more go in."""
        return self.block_size - len(self._tokens)

    @property
    def position(self) -> int:
        """How many blocks are before it."""
        return 0 if self._parent is None else self._parent.position + 1

    def push(self, token: int) -> None:
        """Add a token. Raises TokenBlockFullError, InvalidFieldError for one that is no u32."""
        if not self.remaining:
            raise TokenBlockFullError(self.block_size)
        _refuse_odd_tokens((token,))
        self._tokens.append(token)

    def push_all(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add as many as go in; returns the others. Raises InvalidFieldError, adding none."""
        _refuse_odd_tokens(tokens)
        room = self.remaining
        self._tokens += tokens[:room]
        return tokens[room:]

    def pop(self) -> int:
        """Take the last token away. Raises TokenBlockEmptyError."""
        if not self._tokens:
            raise TokenBlockEmptyError
        return self._tokens.pop()

    def pop_many(self, count: int) -> None:
        """Take the last tokens away. Raises InsufficientTokensError, taking none."""
        if not 0 <= count <= len(self._tokens):
            raise InsufficientTokensError(count, len(self._tokens))
        del self._tokens[len(self._tokens) - count :]

    def commit(self) -> TokenBlock:
        """The full block that this was; from now on this is the empty one after it.

        Raises TokenBlockIncompleteError.
        """
        if self.remaining:
            raise TokenBlockIncompleteError(len(self._tokens), self.block_size)
        self._parent = block = self._named()
        self._tokens.clear()
        return block

    def _named(self) -> TokenBlock:
        parent, families = self._parent, self._families
        routed = None if parent is None else parent.routed.sequence_hash
        salted = None if parent is None else parent.salted.sequence_hash
        return TokenBlock(
            tuple(self._tokens),
            self.position,
            families.routed.names(self._tokens, routed),
            families.salted.names(self._tokens, salted),
            families,
        )


class TokenBlockSequence:
    """All tokens of a request: full blocks, and one that is not.

    Invariants: 0 ≤ tokens in the partial block < block_size; whatever the way in which the same
    tokens came here, the names are the same.
    """

    __slots__ = ("_blocks", "_partial", "block_size", "families")

    def __init__(self, tokens: Sequence[int], block_size: int, families: Families) -> None:
        """Raises InvalidFieldError."""
        if block_size < 1:
            raise InvalidFieldError("block_size", f"{block_size}", "at least 1 token")
        self.block_size = block_size
        self.families = families
        self._blocks: list[TokenBlock] = []
        self._partial = PartialTokenBlock(block_size, families)
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self._blocks) * self.block_size + len(self._partial)

    @property
    def blocks(self) -> Sequence[TokenBlock]:
        """The full blocks, in order; to read."""
        return self._blocks

    @property
    def partial(self) -> PartialTokenBlock:
        """The block that grows; to read."""
        return self._partial

    @property
    def last_block(self) -> TokenBlock | None:
        """The last full block."""
        return self._blocks[-1] if self._blocks else None

    def append(self, token: int) -> int | None:
        """Add a token; the index of the block that this fills, if it fills one.

        Raises InvalidFieldError.
        """
        self._partial.push(token)
        return None if self._partial.remaining else self._commit()

    def extend(self, tokens: Sequence[int]) -> range:
        """Add tokens; the indices of the blocks that this fills. O(tokens).

        Raises InvalidFieldError, adding none.
        """
        _refuse_odd_tokens(tokens)
        first = len(self._blocks)
        for token_run in _runs(tokens, self._partial.remaining, self.block_size):
            self._partial.push_all(token_run)
            if not self._partial.remaining:
                self._commit()
        return range(first, len(self._blocks))

    def truncate(self, length: int) -> None:
        """Keep the first tokens; more than there are: all. O(blocks dropped).

        Raises InvalidFieldError for a length below 0.
        """
        if length < 0:
            raise InvalidFieldError("length", f"{length}", "0 tokens or more")
        if length >= len(self):
            return
        full, kept = divmod(length, self.block_size)
        cut = self._blocks[full].tokens if full < len(self._blocks) else self._partial.tokens
        del self._blocks[full:]
        self._partial = PartialTokenBlock(
            self.block_size, self.families, self.last_block, cut[:kept]
        )

    def unwind(self, count: int) -> None:
        """Take the last tokens away. Raises InsufficientTokensError, taking none."""
        if not 0 <= count <= len(self):
            raise InsufficientTokensError(count, len(self))
        self.truncate(len(self) - count)

    def pop(self) -> int | None:
        """Take the last token away, if there is one."""
        if not len(self):
            return None
        [token] = self.tokens_at(len(self) - 1, len(self))
        self.unwind(1)
        return token

    def reset(self) -> None:
        """Take all tokens away."""
        self.truncate(0)

    def tokens_at(self, start: int, end: int) -> list[int]:
        """The tokens of a range; none if it is not one of this sequence's."""
        if not 0 <= start <= end <= len(self):
            return []
        first = start // self.block_size
        blocks = self._blocks[first : -(-end // self.block_size)]
        tokens = chain(*(block.tokens for block in blocks), self._partial.tokens)
        return list(tokens)[start - first * self.block_size : end - first * self.block_size]

    def _commit(self) -> int:
        self._blocks.append(self._partial.commit())
        return len(self._blocks) - 1


def _runs(tokens: Sequence[int], first: int, size: int) -> Iterable[Sequence[int]]:
    """Cut after the first so many, then each time after so many more."""
    yield tokens[:first]
    for start in range(first, len(tokens), size):
        yield tokens[start : start + size]


def _refuse_odd_tokens(tokens: Sequence[int]) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) <= U32_MAX:
        odd = next(token for token in tokens if not 0 <= token <= U32_MAX)
        raise InvalidFieldError("tokens", f"{odd}", "token ids from 0 to 2^32 - 1")

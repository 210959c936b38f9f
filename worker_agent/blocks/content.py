"""A block that is filled token by token, and what may be done to it when.

Source: the block states of Dynamo's first block manager.
"""

from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType

from router.block_errors import BlockStateError
from router.errors import InvalidFieldError
from router.sequence.block_families import Families
from router.sequence.tokens import PartialTokenBlock, TokenBlock


class BlockState(StrEnum):
    """How far a block is."""

    RESET = "reset"
    """It holds nothing."""
    PARTIAL = "partial"
    """It is being filled."""
    COMPLETE = "complete"
    """It is full, and has a hash."""
    REGISTERED = "registered"
    """It is full, and others may use it."""


class Operation(StrEnum):
    """What may be done to a block."""

    INIT_SEQUENCE = "init_sequence"
    ADD_TOKENS = "add_tokens"
    POP_TOKENS = "pop_tokens"
    COMMIT = "commit"
    APPLY_TOKEN_BLOCK = "apply_token_block"  # noqa: S105
    REGISTER = "register"
    RESET = "reset"


TRANSITIONS = MappingProxyType(
    {
        (BlockState.RESET, Operation.INIT_SEQUENCE): BlockState.PARTIAL,
        (BlockState.RESET, Operation.APPLY_TOKEN_BLOCK): BlockState.COMPLETE,
        (BlockState.PARTIAL, Operation.ADD_TOKENS): BlockState.PARTIAL,
        (BlockState.PARTIAL, Operation.POP_TOKENS): BlockState.PARTIAL,
        (BlockState.PARTIAL, Operation.COMMIT): BlockState.COMPLETE,
        (BlockState.COMPLETE, Operation.REGISTER): BlockState.REGISTERED,
        **{(state, Operation.RESET): BlockState.RESET for state in BlockState},
    }
)
"""What each operation makes of each state; what is not here is refused."""


class BlockContent:
    """The tokens of one block of a pool, `block`, and its state."""

    __slots__ = ("_partial", "_token_block", "block", "block_size", "state")

    def __init__(self, block: int, block_size: int) -> None:
        self.block = block
        self.block_size = block_size
        self.state = BlockState.RESET
        self._partial: PartialTokenBlock | None = None
        self._token_block: TokenBlock | None = None

    def __len__(self) -> int:
        """Tokens in it."""
        if self._token_block is not None:
            return self.block_size
        return 0 if self._partial is None else len(self._partial)

    @property
    def token_block(self) -> TokenBlock:
        """Its tokens and names. Raises BlockStateError before it is complete."""
        if self._token_block is None:
            raise BlockStateError(self.block, self.state, "complete or registered")
        return self._token_block

    def init_sequence(self, families: Families, parent: TokenBlock | None = None) -> None:
        """Begin to fill it, after `parent`. Raises BlockStateError."""
        after = self._after(Operation.INIT_SEQUENCE)
        self._partial = PartialTokenBlock(self.block_size, families, parent)
        self.state = after

    def add_token(self, token: int) -> None:
        """Raises BlockStateError, TokenBlockFullError, InvalidFieldError."""
        self._filling(Operation.ADD_TOKENS).push(token)

    def add_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add as many as go in; returns the others. Raises BlockStateError, InvalidFieldError."""
        return self._filling(Operation.ADD_TOKENS).push_all(tokens)

    def pop_token(self) -> int:
        """Raises BlockStateError, TokenBlockEmptyError."""
        return self._filling(Operation.POP_TOKENS).pop()

    def pop_tokens(self, count: int) -> None:
        """Raises BlockStateError, InsufficientTokensError, taking none."""
        self._filling(Operation.POP_TOKENS).pop_many(count)

    def commit(self) -> TokenBlock:
        """It is full. Raises BlockStateError, TokenBlockIncompleteError."""
        self._token_block = self._filling(Operation.COMMIT).commit()
        self._partial = None
        self.state = BlockState.COMPLETE
        return self._token_block

    def apply_token_block(self, token_block: TokenBlock) -> None:
        """It is filled at once. Raises BlockStateError, InvalidFieldError for another size."""
        after = self._after(Operation.APPLY_TOKEN_BLOCK)
        if len(token_block.tokens) != self.block_size:
            reason = f"{len(token_block.tokens)} tokens"
            raise InvalidFieldError("token_block", reason, f"{self.block_size} tokens")
        self._token_block = token_block
        self.state = after

    def register(self) -> None:
        """Others may use it from now on. Raises BlockStateError."""
        self.state = self._after(Operation.REGISTER)

    def reset(self) -> None:
        """It holds nothing any more."""
        self.state = self._after(Operation.RESET)
        self._partial = self._token_block = None

    def _filling(self, operation: Operation) -> PartialTokenBlock:
        self._after(operation)
        assert self._partial is not None
        return self._partial

    def _after(self, operation: Operation) -> BlockState:
        after = TRANSITIONS.get((self.state, operation))
        if after is None:
            allowed = [state for state, each in TRANSITIONS if each is operation]
            raise BlockStateError(self.block, self.state, f"{operation}: {', '.join(allowed)}")
        return after

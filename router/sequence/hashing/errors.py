"""Errors of blocks of tokens. Each leaves its block unchanged."""

from router.errors import KvRouterError


class TokenBlockError(KvRouterError):
    """An operation that a block of tokens does not allow; the block is unchanged."""

    code = "token_block"


class TokenBlockFullError(TokenBlockError):
    """A token for a block that is full."""

    code = "token_block_full"

    def __init__(self, block_size: int) -> None:
        super().__init__(f"token: the block is full (allowed: {block_size} tokens)")
        self.block_size = block_size


class TokenBlockIncompleteError(TokenBlockError):
    """A commit of a block that is not full."""

    code = "token_block_incomplete"

    def __init__(self, tokens: int, block_size: int) -> None:
        super().__init__(f"block: it has {tokens} tokens (allowed: {block_size})")
        self.tokens = tokens
        self.block_size = block_size


class TokenBlockEmptyError(TokenBlockError):
    """A removal of a token from an empty block."""

    code = "token_block_empty"

    def __init__(self) -> None:
        super().__init__("block: it is empty (allowed: at least one token)")


class InsufficientTokensError(TokenBlockError):
    """A removal of more tokens than there are."""

    code = "insufficient_tokens"

    def __init__(self, wanted: int, tokens: int) -> None:
        super().__init__(f"tokens: {wanted} requested (allowed: at most {tokens})")
        self.wanted = wanted
        self.tokens = tokens

"""What is refused of blocks, tokens and layouts; part of the tree in `errors`.

KvRouterError
├── TokenBlockError                  a block of tokens, or a sequence of them
│   ├── TokenBlockFullError          no token more goes in
│   ├── TokenBlockIncompleteError    only a full block gets a name
│   ├── TokenBlockEmptyError         there is no token to take
│   └── InsufficientTokensError      there are fewer tokens than are to be taken
├── LayoutError                      where a block's bytes lie
│   ├── BlockIndexError              no such block, layer or outer dimension
│   └── RegionError                  memory that a layout can not be laid on
├── BlockStateError                  a block is not in a state for that
├── ReleasedBlocksError              the handle's blocks are no longer its own
├── NotEnoughBlocksError             fewer blocks can be had than are wanted
├── PoolClosedError                  a pool hands out no blocks any more
├── PoolInUseError                   blocks are in use that everything was to be taken from
├── StorageError                     memory, a file or a store for blocks can not be had
│   └── RegistrationError            a name that relies on a storage, twice or never
└── TransferError                    blocks to be copied that make no copy
"""

from router.errors import KvRouterError


class TokenBlockError(KvRouterError):
    """A block of tokens cannot do what was asked of it; it is left as it was."""

    code = "token_block"


class TokenBlockFullError(TokenBlockError):
    """No token more goes into this block."""

    code = "token_block_full"

    def __init__(self, block_size: int) -> None:
        super().__init__(f"token: the block is full (allowed: {block_size} tokens)")
        self.block_size = block_size


class TokenBlockIncompleteError(TokenBlockError):
    """Only a full block can be committed."""

    code = "token_block_incomplete"

    def __init__(self, tokens: int, block_size: int) -> None:
        super().__init__(f"block: it has {tokens} tokens (allowed: {block_size})")
        self.tokens = tokens
        self.block_size = block_size


class TokenBlockEmptyError(TokenBlockError):
    """There is no token to take from this block."""

    code = "token_block_empty"

    def __init__(self) -> None:
        super().__init__("block: it is empty (allowed: at least one token)")


class InsufficientTokensError(TokenBlockError):
    """Fewer tokens are there than are to be taken."""

    code = "insufficient_tokens"

    def __init__(self, wanted: int, tokens: int) -> None:
        super().__init__(f"tokens: {wanted} are to be taken (allowed: at most {tokens})")
        self.wanted = wanted
        self.tokens = tokens


class LayoutError(KvRouterError):
    """A description of where a block's bytes lie does not fit itself, or the memory it is laid on.

    `rule` names what was broken, in Dynamo's words where it has some.
    """

    code = "layout"

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule


class BlockIndexError(LayoutError):
    """There is no such block, layer or outer dimension."""

    code = "block_index"

    def __init__(self, field: str, index: int, count: int) -> None:
        super().__init__(field, f"{index}", f"0 to {count - 1}", rule=f"{field}_out_of_range")
        self.index = index
        self.count = count


class RegionError(LayoutError):
    """The memory given to a layout is not what it needs."""

    code = "layout_region"


class BlockStateError(KvRouterError):
    """A block is not in a state in which this can be done to it; nothing was done."""

    code = "block_state"

    def __init__(self, block: int, state: str, allowed: str) -> None:
        super().__init__(f"block: {block} is {state} (allowed: {allowed})")
        self.block = block
        self.state = state
        self.allowed = allowed


class PoolInUseError(KvRouterError):
    """Blocks are in use that everything was to be taken from; nothing was done."""

    code = "pool_in_use"

    def __init__(self, total_blocks: int, available_blocks: int) -> None:
        super().__init__(
            f"pool: total blocks: {total_blocks}, available blocks: {available_blocks} "
            "(allowed: a pool nobody uses)"
        )
        self.total_blocks = total_blocks
        self.available_blocks = available_blocks


class ReleasedBlocksError(KvRouterError):
    """These blocks were released, or handed on; another may use them now."""

    code = "released_blocks"

    def __init__(self) -> None:
        super().__init__("blocks: released already (allowed: a handle that is not)")


class NotEnoughBlocksError(KvRouterError):
    """Fewer blocks can be had than are wanted; none was allocated."""

    code = "not_enough_blocks"

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"blocks: {requested} requested (allowed: at most {available} now)")
        self.requested = requested
        self.available = available


class StorageError(KvRouterError):
    """Memory, a file or a store for blocks cannot be had, or not this part of it."""

    code = "storage"

    def __init__(self, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field


class RegistrationError(StorageError):
    """A name cannot be registered with a storage, or taken away from it."""

    code = "storage_registration"


class TransferError(KvRouterError):
    """Blocks that were to be copied make no copy; nothing was done. `rule`: which was broken."""

    code = "transfer"

    def __init__(self, field: str, reason: str, allowed: str, *, rule: str) -> None:
        super().__init__(f"{field}: {reason} (allowed: {allowed})")
        self.field = field
        self.rule = rule


class PoolClosedError(KvRouterError):
    """The pool's blocks are handed out no longer: its manager was closed, or is being closed."""

    code = "pool_closed"

    def __init__(self) -> None:
        super().__init__("pool: closed (allowed: one of a block manager that is open)")

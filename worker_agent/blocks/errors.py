"""Errors of block pools. Each leaves the pool unchanged."""

from router.errors import KvRouterError


class BlockStateError(KvRouterError):
    """A block in the wrong state for an operation; nothing was changed."""

    code = "block_state"

    def __init__(self, block: int, state: str, allowed: str) -> None:
        super().__init__(f"block: {block} is {state} (allowed: {allowed})")
        self.block = block
        self.state = state
        self.allowed = allowed


class PoolInUseError(KvRouterError):
    """A pool to be emptied that has blocks in use; nothing was changed."""

    code = "pool_in_use"

    def __init__(self, total_blocks: int, available_blocks: int) -> None:
        super().__init__(
            f"pool: total blocks: {total_blocks}, available blocks: {available_blocks} "
            "(allowed: a pool without blocks in use)"
        )
        self.total_blocks = total_blocks
        self.available_blocks = available_blocks


class ReleasedBlocksError(KvRouterError):
    """Blocks that were released or handed on, and may be in use elsewhere."""

    code = "released_blocks"

    def __init__(self) -> None:
        super().__init__("blocks: released already (allowed: a handle in use)")


class NotEnoughBlocksError(KvRouterError):
    """A request for more blocks than are available; none was allocated."""

    code = "not_enough_blocks"

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"blocks: {requested} requested (allowed: at most {available} now)")
        self.requested = requested
        self.available = available


class PoolClosedError(KvRouterError):
    """A pool that allocates no more blocks, because its manager was closed or is closing."""

    code = "pool_closed"

    def __init__(self) -> None:
        super().__init__("pool: closed (allowed: a pool of an open block manager)")

"""What the two halves have to know of the engine, and the tiers that follow from it."""

from msgspec import Struct

from router.errors import InvalidFieldError
from worker_agent.agent_tiers import with_lower_tiers
from worker_agent.connector.vllm_parts.settings import ConnectorSettings
from worker_agent.manager_config import BlockManagerConfig, CacheModel


class EngineFacts(Struct, frozen=True, kw_only=True):
    """An engine with one kind of block, as each of its processes knows it."""

    model: str
    """All that the bytes of a block depend on but its tokens, the same for all workers."""
    block_size: int
    """Tokens."""
    num_blocks: int
    """Of the engine's memory."""
    rank: int = 0
    """Of a worker, among `num_ranks`: each has a part of every block."""
    num_ranks: int = 1
    dp_rank: int = 0


def tiers_of(
    settings: ConnectorSettings, facts: EngineFacts, block_bytes: int
) -> BlockManagerConfig:
    """The tiers of a worker, for which a block is so many bytes. Raises InvalidFieldError."""
    inner, odd = divmod(block_bytes, facts.block_size)
    if odd:
        allowed = f"a multiple of {facts.block_size} tokens"
        raise InvalidFieldError("block_bytes", f"{block_bytes}", allowed)
    part = f"{facts.model}/{facts.rank} of {facts.num_ranks}"
    model = CacheModel(
        num_layers=1,
        outer_dim=1,
        page_size=facts.block_size,
        inner_dim=inner,
        dtype="uint8",
        name=part,
    )
    stem = f"kv-{settings.id}-{facts.dp_rank}-{facts.rank}"
    return with_lower_tiers(settings, model, stem)

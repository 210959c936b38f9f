"""A shared pool: every public call of a pool takes the lock."""

from worker_agent.blocks.pool import BlockPool
from worker_agent.manager.shared_pool import SharedPool

WITHOUT_LOCK = {"num_blocks", "used_blocks", "name", "state", "counters"}
"""Fixed, made of others, or a single read."""


def test_every_call_takes_the_lock():
    public = {name for name in vars(BlockPool) if not name.startswith("_")}
    assert public - WITHOUT_LOCK == {name for name in vars(SharedPool) if not name.startswith("_")}

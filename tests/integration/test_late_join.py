"""A router that starts late reads all held blocks from the stream, and calls them exact."""

import numpy as np
import pytest

from router.protocol.values import Tier
from router.publisher.journal.journal import DEFAULT_LIMITS
from support.processes.servers import eventually

WORKERS = 4
PATIENCE_S = 240.0
"""Seconds of one core's work, where there is one."""


@pytest.mark.parametrize(
    ("ranks", "blocks"), [(20, 2_500), pytest.param(50, 5_000, marks=pytest.mark.long)]
)
async def test_blocks_of_many_ranks_are_read(plane, ranks, blocks):
    rng = np.random.default_rng(3)
    for worker_id in range(1, WORKERS + 1):
        edge = await plane.edge(worker_id, dp_size=ranks, limits=DEFAULT_LIMITS)
        for here in edge.ranks.values():
            hashes = rng.integers(1, 1 << 63, blocks, dtype=np.uint64)
            here.events.stored(Tier.DEVICE, hashes.tolist(), None)
            here.life.note_change()
    await eventually(lambda: _is_published(plane, blocks), PATIENCE_S)
    router = await plane.router()
    await eventually(router.is_up)
    await eventually(lambda: _is_exact(router, WORKERS * ranks), PATIENCE_S)
    await plane.until_right()


def _is_published(plane, blocks):
    ranks = [here for edge in plane.edges.values() for here in edge.ranks.values()]
    return all(here.events.published.state.counts[Tier.DEVICE] == blocks for here in ranks)


async def _is_exact(router, ranks):
    states = [state for _, state in (await router.trusted()).values()]
    return len(states) == ranks and set(states) == {"exact"}

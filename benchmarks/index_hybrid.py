"""Searches among ranks of hybrid models.

The peer indexes full attention only, and is asked for that. The fleet: 128 workers, whose overlaps
end all over the second half of the prompt; each has one checkpoint, there or up to 40 blocks below.
"""

from collections.abc import Callable, Sequence
from itertools import repeat

from index_worlds import Path, World, random_path
from peer import stored_event
from rows import Row
from timing import Bounded, CallTimes, Scale, alternate, call_times, median_us

from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import ClassStored, EventBatch, Stored, pack_batch
from router.protocol.hybrid import HybridState, LayerClass, Layout
from router.protocol.values import SCHEME, HashArray, HeldState, Identity, Rank, Tier, pack_hashes

BLOCK_SIZE = 16
IDENTITY = Identity(SCHEME, BLOCK_SIZE)
WORKERS = 128
GOALS_US = {512: 20, 6_250: 130}
BELOW_BLOCKS = 40
ONLY_FULL = "the peer: of full attention only"

STATE = LayerClass("state", BLOCK_SIZE)
LAYOUTS = {
    "state": Layout(BLOCK_SIZE, BLOCK_SIZE, (STATE,)),
    "window 8": Layout(BLOCK_SIZE, BLOCK_SIZE, (LayerClass("window", BLOCK_SIZE, 129),)),
    "window 64": Layout(BLOCK_SIZE, BLOCK_SIZE, (LayerClass("window", BLOCK_SIZE, 1025),)),
}


def hold(tree: RadixTree, rank: Rank, layout: Layout, full: HashArray, held: HashArray) -> None:
    """Hold blocks of full attention, and others in the layout's only class."""
    events = (Stored(Tier.DEVICE, pack_hashes(full)), ClassStored(0, pack_hashes(held)))
    packed = pack_batch(HeldState(), events)
    batch = EventBatch(
        rank.worker_id, 0, 1, IDENTITY, 1, len(events), packed, HybridState(layout, (0,), (0,))
    )
    tree.apply(rank, batch, 0, len(packed))


def needed_blocks(layout: Layout) -> int:
    return max(-(-(layout.classes[0].span_tokens - 1) // BLOCK_SIZE), 1)


def hybrid_rows(scale: Scale) -> list[Row]:
    """The prompts that workers can resume, of two lengths, by the layers beside full attention."""
    rows: list[Row] = []
    for blocks, goal_us in GOALS_US.items():
        for name, layout in LAYOUTS.items():
            world = World()
            path = random_path(world.random, blocks)
            _hold_everywhere(world, path, layout)
            times = alternate(_sides(world, path, scale), scale.rounds, warm_up=True)
            figures = [median_us(each) for each in times]
            cell = f"{blocks}×{WORKERS}, {name}"
            rows.append(Bounded(cell, *figures, "µs", goal_us, lower=True, note=ONLY_FULL))
    return rows


def _hold_everywhere(world: World, path: Path, layout: Layout) -> None:
    """Let every worker hold a part of a path, and a checkpoint in it."""
    blocks, hashes = len(path.sequence_hashes), path.sequence_hashes
    needed = max(-(-(layout.classes[0].span_tokens - 1) // BLOCK_SIZE), 1)
    for worker_id in range(WORKERS):
        end = int(world.random.integers(blocks // 2, blocks))
        checkpoint = end - int(world.random.choice([0, BELOW_BLOCKS]))
        held = hashes[max(checkpoint - needed, 0) : checkpoint]
        hold(world.ours, Rank(worker_id, 0), layout, hashes[:end], held)
        head = path.head(end)
        locals_, sequence = head.local_hashes.tolist(), head.sequence_hashes.tolist()
        world.peer.apply(worker_id, stored_event(0, None, locals_, sequence))


def _sides(world: World, path: Path, scale: Scale) -> Sequence[Callable[[int], CallTimes]]:
    hashes, local_hashes = path.sequence_hashes, path.local_hashes.tolist()
    find, isl_tokens = world.ours.resumable, len(hashes) * BLOCK_SIZE

    def ours(_: int) -> CallTimes:
        repeated = repeat(hashes, scale.calls)
        return call_times(lambda each: find(each, isl_tokens, BLOCK_SIZE), repeated)

    def peer(_: int) -> CallTimes:
        return call_times(world.peer.find, repeat(local_hashes, scale.calls))

    return ours, peer

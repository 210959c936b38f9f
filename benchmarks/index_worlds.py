"""The same blocks in our index and in the peer's."""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from msgspec import Struct
from peer import PeerTree, removed_event, stored_event

from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import HashArray, PerTier, Rank, Tier
from router.sequence.hashing.block_hashes import chain

MAX_BLOCKS = 1 << 25
FILL_LENGTHS = (64, 512, 8192)
FILL_WORKERS = 128
NO_HOLES = (0, 0, 0, 0)


class Path(Struct, frozen=True):
    """A prompt, as blocks."""

    local_hashes: HashArray
    sequence_hashes: HashArray

    def head(self, blocks: int) -> "Path":
        return Path(self.local_hashes[:blocks], self.sequence_hashes[:blocks])


def random_hashes(random: np.random.Generator, blocks: int) -> HashArray:
    return random.integers(0, 1 << 64, blocks, dtype=np.uint64)


def random_path(random: np.random.Generator, blocks: int) -> Path:
    local_hashes = random_hashes(random, blocks)
    return Path(local_hashes, chain(local_hashes))


def half_known(random: np.random.Generator, path: Path) -> Path:
    """A prompt of the same length that leaves the path in the middle."""
    half = len(path.local_hashes) // 2
    tail = random_hashes(random, len(path.local_hashes) - half)
    local_hashes = np.concatenate([path.local_hashes[:half], tail])
    return Path(local_hashes, chain(local_hashes))


class World:
    """Both trees, and what was put into them."""

    def __init__(self, seed: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.ours = RadixTree(max_blocks=MAX_BLOCKS)
        self.peer = PeerTree()
        self.paths: dict[int, list[Path]] = {}
        """What `fill` made, by length."""

    def new_path(self, blocks: int, worker_ids: Iterable[int]) -> Path:
        """A path that these workers hold."""
        path = random_path(self.random, blocks)
        self.hold(path, worker_ids)
        return path

    def hold(self, path: Path, worker_ids: Iterable[int]) -> None:
        event = stored_event(0, None, path.local_hashes.tolist(), path.sequence_hashes.tolist())
        for worker_id in worker_ids:
            self.ours.store(Rank(worker_id, 0), Tier.DEVICE, path.sequence_hashes)
            self.ours.note_holes(Rank(worker_id, 0), NO_HOLES)
            self.peer.apply(worker_id, event)

    def remove(self, sequence_hashes: HashArray, worker_id: int, holes: PerTier) -> None:
        self.ours.remove(Rank(worker_id, 0), Tier.DEVICE, sequence_hashes)
        self.ours.note_holes(Rank(worker_id, 0), holes)
        self.peer.apply(worker_id, removed_event(0, sequence_hashes.tolist()))

    def drop(self, worker_ids: Iterable[int]) -> None:
        """Forget these workers, entirely."""
        for worker_id in worker_ids:
            self.ours.clear(Rank(worker_id, 0))
            self.peer.drop(worker_id)
        while self.ours.sweep(1_024):
            pass

    def fill(
        self,
        blocks: int,
        lengths: Sequence[int] = FILL_LENGTHS,
        workers: int = FILL_WORKERS,
    ) -> None:
        """Add about `blocks` blocks: as many in paths of each length, each held by one worker."""
        for length in lengths:
            known = self.paths.setdefault(length, [])
            for number in range(blocks // len(lengths) // length):
                known.append(self.new_path(length, [number % workers]))

    def require_same_answers(self, paths: Iterable[Path]) -> None:
        """Raise RuntimeError unless both trees answer the same for these, and of half of each."""
        for path in paths:
            for asked in (path, half_known(self.random, path)):
                scores = self.ours.find_matches(asked.sequence_hashes)
                ours = {rank.worker_id: overlap.device for rank, overlap in scores.items()}
                if ours != self.peer.depths(asked.local_hashes.tolist()):
                    raise RuntimeError("our index and the peer's give different answers")


@cache
def filled_world(blocks: int) -> World:
    """Return a world of about `blocks` blocks, made once; others find what is added to it."""
    world = World()
    world.fill(blocks)
    every = [path for paths in world.paths.values() for path in paths]
    world.require_same_answers(every[:: max(len(every) // 50, 1)])
    return world

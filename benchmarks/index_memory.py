"""Resident memory a block while an index grows, each side in a process of its own.

As a command (`index_memory.py ours|peer BLOCKS`) it is that process, and prints JSON.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from index_worlds import MAX_BLOCKS, NO_HOLES, random_hashes
from msgspec import Struct
from peer import PeerTree, stored_event
from rows import Row
from timing import Bounded, Scale

from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import HashArray, Rank, Tier

BLOCKS, WORKERS, PATH_BLOCKS, EVENT_BLOCKS = 5_000_000, 128, 512, 128
COUNTED_FROM = 1_000_000
"""With fewer blocks, what an empty index takes would count for too much."""

SAMPLE_BLOCKS = 16_384
GOAL_BYTES = 40

Storer = Callable[[int, int | None, HashArray], None]
"""Stores an event of a worker's blocks after a parent."""


class Growth(Struct, frozen=True):
    """Bytes a block over the same process without any: the most there ever were, and at the end."""

    worst: float
    final: float


def memory_rows(_: Scale) -> list[Row]:
    """Blocks with one holder each."""
    ours, peer = _in_child("ours"), _in_child("peer")
    return [
        Bounded("worst while growing", ours.worst, peer.worst, "B/block", GOAL_BYTES, lower=True),
        Bounded("with 5 M blocks", ours.final, peer.final, "B/block", GOAL_BYTES, lower=True),
    ]


def _in_child(side: str) -> Growth:
    command = [sys.executable, __file__, side, str(BLOCKS)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return Growth(**json.loads(done.stdout))


def grow(make_storer: Callable[[], Storer], blocks: int) -> Growth:
    """Grow an index; a peak between two samples counts as of the later one."""
    random = np.random.default_rng(1)
    _store_paths(make_storer(), random, SAMPLE_BLOCKS)
    store = make_storer()
    _start_peak()
    start, worst = _resident_bytes("VmRSS"), 0.0
    for known in range(SAMPLE_BLOCKS, blocks + 1, SAMPLE_BLOCKS):
        _store_paths(store, random, SAMPLE_BLOCKS)
        if known >= COUNTED_FROM:
            worst = max(worst, (_resident_bytes("VmHWM") - start) / known)
        _start_peak()
    return Growth(worst, (_resident_bytes("VmRSS") - start) / known)


def our_storer() -> Storer:
    tree = RadixTree(max_blocks=MAX_BLOCKS)

    def store(worker_id: int, _: int | None, hashes: HashArray) -> None:
        tree.store(Rank(worker_id, 0), Tier.DEVICE, hashes)
        tree.note_holes(Rank(worker_id, 0), NO_HOLES)

    return store


def peer_storer() -> Storer:
    tree = PeerTree()

    def store(worker_id: int, parent: int | None, hashes: HashArray) -> None:
        names = hashes.tolist()
        tree.apply(worker_id, stored_event(0, parent, names, names))

    return store


def _store_paths(store: Storer, random: np.random.Generator, blocks: int) -> None:
    for _ in range(0, blocks, PATH_BLOCKS):
        worker_id, parent = int(random.integers(WORKERS)), None
        for _ in range(0, PATH_BLOCKS, EVENT_BLOCKS):
            hashes = random_hashes(random, EVENT_BLOCKS)
            store(worker_id, parent, hashes)
            parent = int(hashes[-1])


def _start_peak() -> None:
    """Let the process's peak be measured from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    storers = {"ours": our_storer, "peer": peer_storer}
    growth = grow(storers[sys.argv[1]], int(sys.argv[2]))
    print(json.dumps({"worst": growth.worst, "final": growth.final}))

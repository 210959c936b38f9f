"""Searches: warm, cold, and by holders that do not match alike; and the hashing before them."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TypeVar

import numpy as np
from index_worlds import Path, World, filled_world, half_known
from peer import peer_block_hashes
from rows import Row
from timing import Bounded, CallTimes, Scale, alternate, call_rows, call_times, median_us, pooled

from router.sequence.hashing.block_hashes import chain, local_block_hashes, token_array

T = TypeVar("T")

HOLDERS = (1, 8, 128)
SEQUENCE_GOALS = {64: 8, 512: 15, 8192: 80}
LOCAL_GOALS = {64: 4, 512: 4, 8192: 2.5}
READ_GOAL = UNEVEN_GOAL = HALF_GOAL = 1
COLD_GOALS = {64: 5, 512: 10, 8192: 15}
COLD_PATHS = 400
"""Searched for in a round, at most."""

UNCOUNTED = 2
"""Calls at the start of a round: they find the caches full of the other side's code."""

DEPTHS = [(holder + 1) * 64 for holder in range(128)]
ONE_HOLE = (1, 1, 1, 1)

PROMPT_TOKENS, BLOCK_SIZE = 8_192, 16
HASHING_GOAL_US = 10


def warm_rows(scale: Scale) -> list[Row]:
    """One path over and over, held to its end by some workers: the peer against our search from
    sequence hashes, and against ours with the chaining before it. Answers are not read, except
    in the rows that say so.
    """
    world = filled_world(scale.blocks)
    rows = []
    for depth, goal in SEQUENCE_GOALS.items():
        for holders in HOLDERS:
            path = world.new_path(depth, range(holders))
            world.require_same_answers([path])
            sequence, local, peer = _warm_times(world, path, scale)
            cell = f"{depth}×{holders}"
            rows += call_rows(f"sequence {cell}", goal, sequence, peer)
            rows += call_rows(f"local {cell}", LOCAL_GOALS[depth], local, peer)
        rows += call_rows(f"read {cell}", READ_GOAL, *_read_times(world, path, scale))
    return rows


def cold_rows(scale: Scale) -> list[Row]:
    """Another path with every call, each held by one worker, in a tree larger than the caches: the
    whole path, then paths left in the middle.
    """
    world = filled_world(scale.many_blocks)
    rows = []
    for depth, goal in COLD_GOALS.items():
        known = world.paths[depth]
        paths = [known[i] for i in world.random.permutation(len(known))]
        size = min(COLD_PATHS, len(paths) // (2 * scale.rounds))
        shares = [paths[i * size : (i + 1) * size] for i in range(2 * scale.rounds)]
        whole, halves = shares[: scale.rounds], shares[scale.rounds :]
        halves = [[half_known(world.random, path) for path in share] for share in halves]
        rows += call_rows(f"cold {depth}", goal, *map(pooled, search_times(world, whole)))
        left = map(pooled, search_times(world, halves))
        rows += call_rows(f"cold {depth}, half", HALF_GOAL, *left)
    return rows


def uneven_rows(scale: Scale) -> list[Row]:
    """A path of 8,192 blocks: held to 128 depths, with the middle missing, left in the middle.

    And one of 512 blocks, held to 128 depths of the second half, some of them equal.
    """
    world = filled_world(scale.blocks)
    cases = {
        "128 depths": _path_at_depths(world, range(1_000, 1_128)),
        "128, a hole": _path_at_depths(world, range(2_000, 2_128)),
        "1, a hole": world.new_path(DEPTHS[-1], [3_000]),
    }
    short = [512, *map(int, world.random.integers(256, 512, 127))]
    cases["128 depths of 512"] = _path_at_depths(world, range(4_000, 4_128), short)
    shared = world.new_path(DEPTHS[-1], range(128))
    cases["128, half"] = half_known(world.random, shared)
    _make_hole(world, cases["128, a hole"], 2_127)
    _make_hole(world, cases["1, a hole"], 3_000)
    rows = []
    for name, path in cases.items():
        world.require_same_answers([path])
        ours, _, peer = _warm_times(world, path, scale)
        rows += call_rows(name, UNEVEN_GOAL, ours, peer)
    return rows


def hashing_rows(scale: Scale) -> list[Row]:
    """A prompt from tokens to sequence hashes; the peer's call ends with the local ones."""
    token_ids = np.random.default_rng(1).integers(0, 100_000, PROMPT_TOKENS).tolist()
    tokens = token_array(token_ids)
    local_hashes = [int(each) for each in local_block_hashes(tokens, BLOCK_SIZE)]
    if local_hashes != peer_block_hashes(token_ids, BLOCK_SIZE):
        raise RuntimeError("our block hashes and the peer's differ")
    ours, peer = alternate(
        (
            _repeated(lambda each: chain(local_block_hashes(each, BLOCK_SIZE)), tokens, scale),
            _repeated(lambda each: peer_block_hashes(each, BLOCK_SIZE), token_ids, scale),
        ),
        scale.rounds,
        warm_up=True,
    )
    figures = (median_us(ours), median_us(peer))
    return [Bounded("512 blocks of 16", *figures, "µs", HASHING_GOAL_US, lower=True)]


def _warm_times(world: World, path: Path, scale: Scale) -> list[list[CallTimes]]:
    """From sequence hashes, from local hashes, and the peer's."""
    find = world.ours.find_matches
    sides = (
        _repeated(find, path.sequence_hashes, scale),
        _repeated(lambda local_hashes: find(chain(local_hashes)), path.local_hashes, scale),
        _repeated(world.peer.find, path.local_hashes.tolist(), scale),
    )
    return alternate(sides, scale.rounds, warm_up=True)


def _read_times(world: World, path: Path, scale: Scale) -> list[list[CallTimes]]:
    """Ours from sequence hashes, and the peer's, each until its answer can be looked through."""
    find, peer_find = world.ours.find_matches, world.peer.find
    sides = (
        _repeated(lambda hashes: find(hashes).items(), path.sequence_hashes, scale),
        _repeated(lambda hashes: peer_find(hashes).scores, path.local_hashes.tolist(), scale),
    )
    return alternate(sides, scale.rounds, warm_up=True)


def _repeated(call: Callable[[T], object], argument: T, scale: Scale) -> Callable[[int], CallTimes]:
    return lambda _: call_times(call, repeat(argument, scale.calls))


def search_times(world: World, rounds: Sequence[Sequence[Path]]) -> list[list[CallTimes]]:
    """Ours from sequence hashes, and the peer's. What is asked with was just made, as by a hasher;
    how long ago the trees saw it is up to the paths.
    """

    def ours(number: int) -> CallTimes:
        arguments = (path.sequence_hashes.copy() for path in rounds[number])
        return call_times(world.ours.find_matches, arguments)[UNCOUNTED:]

    def peer(number: int) -> CallTimes:
        arguments = (path.local_hashes.tolist() for path in rounds[number])
        return call_times(world.peer.find, arguments)[UNCOUNTED:]

    return alternate((ours, peer), len(rounds))


def _path_at_depths(
    world: World, worker_ids: Sequence[int], depths: Sequence[int] = DEPTHS
) -> Path:
    path = world.new_path(max(depths), ())
    for worker_id, depth in zip(worker_ids, depths, strict=True):
        world.hold(path.head(depth), [worker_id])
    return path


def _make_hole(world: World, path: Path, worker_id: int) -> None:
    """Take the second quarter of the path away from a worker."""
    quarter = len(path.sequence_hashes) // 4
    world.remove(path.sequence_hashes[quarter : 2 * quarter], worker_id, ONE_HOLE)

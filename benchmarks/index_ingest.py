"""Changes, from encoded bytes to visible: blocks stored and removed, and searches meanwhile."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TypeVar

from index_streams import Reader, Step, Stream
from index_worlds import World, filled_world
from rows import Row
from timing import Bounded, CallTimes, Scale, alternate, p99_us, rate_row, whole_time

T = TypeVar("T")

STORED_EVENTS, WORKERS, STORED_GOAL = ((16, 1), (128, 1), (16, 8)), (16, 128, 1_024), 4
"""Blocks an event, and events a message: what has happened since the last flush is one message."""

REMOVED_EVENTS, REMOVING_WORKERS, REMOVED_GOAL = (1, 16, 128), 128, 3
SINGLE_BLOCKS = 65_536
"""Removed one by one, at most."""

FIRST_WORKER = 10_000
"""Of streams; smaller ids hold what worlds are filled with."""

MIXED_EVENTS, SLICE_BLOCKS = (128, 16), 512
INGESTING_SHARE, REQUESTS_PER_S = 0.9, 2_000
MIXED_DEPTH, MIXED_WORKERS, MIXED_GOAL_US = 512, 128, 100


def stored_rows(scale: Scale) -> list[Row]:
    """New blocks into a tree that has many; workers in turn, one event a message."""
    world = filled_world(scale.blocks)
    rows = []
    for event_blocks, message_events in STORED_EVENTS:
        for workers in WORKERS:
            stream = Stream(world, new_workers(workers), scale.stream_blocks)
            *times, blocks = stored_times(world, stream, event_blocks, message_events, scale.rounds)
            several = f", {message_events} a message" if message_events > 1 else ""
            name = f"{event_blocks} × {workers:,}{several}"
            rows.append(rate_row(name, STORED_GOAL, *times, blocks))
    return rows


def removed_rows(scale: Scale) -> list[Row]:
    """The same backwards: every path's blocks, leaf first."""
    world = filled_world(scale.blocks)
    rows = []
    for event_blocks in REMOVED_EVENTS:
        total = SINGLE_BLOCKS if event_blocks == 1 else scale.stream_blocks
        stream = Stream(world, new_workers(REMOVING_WORKERS), total)
        reader = Reader(world, stream.writers)
        _apply_to_both(world, reader, stream.stored(128))
        world.require_same_answers(paths[0] for paths in stream.paths)
        steps = stream.removed(event_blocks)
        ours, peer = _alternate_steps(world, reader, steps, scale.rounds)
        _finish(world, reader, stream)
        blocks = len(steps) // scale.rounds * event_blocks
        rows.append(rate_row(f"remove {event_blocks}", REMOVED_GOAL, ours, peer, blocks))
    return rows


def mixed_rows(scale: Scale) -> list[Row]:
    """Slices are finished once begun; a request takes from when it is due until it is answered."""
    world = filled_world(scale.blocks if scale.quick else scale.many_blocks)
    rows = []
    for event_blocks in MIXED_EVENTS:
        ours, peer = _mixed_times(world, event_blocks, scale)
        figures = p99_us(ours), p99_us(peer)
        name = f"events of {event_blocks}, p99"
        rows.append(Bounded(name, *figures, "µs", MIXED_GOAL_US, lower=True))
    return rows


def stored_times(
    world: World, stream: Stream, event_blocks: int, message_events: int, rounds: int
) -> tuple[list[int], list[int], int]:
    """Round times of ours and the peer's, and blocks a round; all of it is dropped afterwards."""
    reader = Reader(world, stream.writers)
    steps = stream.stored(event_blocks, message_events)
    ours, peer = _alternate_steps(world, reader, steps, rounds)
    world.require_same_answers(paths[0] for paths in stream.paths)
    _finish(world, reader, stream)
    return ours, peer, len(steps) // rounds * event_blocks * message_events


def new_workers(count: int) -> range:
    """Ids of workers that hold nothing yet."""
    return range(FIRST_WORKER, FIRST_WORKER + count)


def _alternate_steps(
    world: World, reader: Reader, steps: Sequence[Step], rounds: int
) -> list[list[int]]:
    """Equal shares of the stream, a share a round to both; in the end all of it."""
    size = len(steps) // rounds
    messages = [step.message for step in steps]
    events = [event for step in steps for event in step.events]
    size_events = len(events) // len(steps) * size

    def ours(number: int) -> int:
        return whole_time(reader.read, messages[number * size : (number + 1) * size])

    def peer(number: int) -> int:
        share = events[number * size_events : (number + 1) * size_events]
        return whole_time(lambda event: world.peer.apply(*event), share)

    times = alternate((ours, peer), rounds)
    _apply_to_both(world, reader, steps[rounds * size :])
    return times


def _apply_to_both(world: World, reader: Reader, steps: Sequence[Step]) -> None:
    for step in steps:
        reader.read(step.message)
        for event in step.events:
            world.peer.apply(*event)


def _finish(world: World, reader: Reader, stream: Stream) -> None:
    reader.require_exact()
    world.require_same_answers(paths[-1] for paths in stream.paths)
    world.drop(writer.rank.worker_id for writer in stream.writers)


def _mixed_times(world: World, event_blocks: int, scale: Scale) -> list[list[CallTimes]]:
    stream = Stream(world, new_workers(MIXED_WORKERS), scale.stream_blocks)
    reader = Reader(world, stream.writers)
    slices = _slices(stream, event_blocks)
    messages = [[step.message for step in each] for each in slices]
    events = [[event for step in each for event in step.events] for each in slices]
    paths = world.paths[MIXED_DEPTH]
    prompts = [paths[i] for i in world.random.integers(len(paths), size=1_000)]
    sequences = [path.sequence_hashes for path in prompts]
    local_lists = [path.local_hashes.tolist() for path in prompts]

    def ours(_: int) -> CallTimes:
        waits = []
        for _ in range(scale.mixed_passes):
            reader.restart()
            waits += _mixed_pass(world, reader.read, messages, world.ours.find_matches, sequences)
        return waits

    def peer(_: int) -> CallTimes:
        waits, apply = [], world.peer.apply
        for _ in range(scale.mixed_passes):
            waits += _mixed_pass(world, lambda e: apply(*e), events, world.peer.find, local_lists)
        return waits

    times = alternate((ours, peer), scale.rounds, warm_up=True)
    _finish(world, reader, stream)
    return times


def _slices(stream: Stream, event_blocks: int) -> list[list[Step]]:
    """Workers in turn, each removes its path and stores the next one; in the end nothing is left.

    A slice is one path, stored or removed: one message of ours.
    """
    slices, message_events = [], SLICE_BLOCKS // event_blocks
    for number in range(len(stream.paths[0])):
        for writer, own in zip(stream.writers, stream.paths, strict=True):
            if number:
                slices.append(writer.removed(own[number - 1], event_blocks, message_events))
            slices.append(writer.stored(own[number], event_blocks, message_events))
    for writer, own in zip(stream.writers, stream.paths, strict=True):
        slices.append(writer.removed(own[-1], event_blocks, message_events))
    return slices


def _mixed_pass(
    world: World,
    ingest: Callable[[T], object],
    slices: Sequence[Sequence[T]],
    find: Callable[[object], object],
    prompts: Sequence[object],
) -> CallTimes:
    """Answer what is due, else ingest a slice where that keeps to its share, until none is left."""
    waits: CallTimes = []
    start = due = perf_counter_ns()
    ingesting = 0
    for changes in slices:
        while (now := perf_counter_ns()) >= due or ingesting > INGESTING_SHARE * (now - start):
            if now >= due:
                find(prompts[len(waits) % len(prompts)])
                waits.append(perf_counter_ns() - due)
                due += int(world.random.exponential(1e9 / REQUESTS_PER_S))
        begun = perf_counter_ns()
        for change in changes:
            ingest(change)
        ingesting += perf_counter_ns() - begun
    return waits

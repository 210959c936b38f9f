"""What a viewer of the dashboard costs a router: processor time and bytes of a frame, by workers.

    python benchmarks/dashboard.py [--quick] [--json] [--only 16,100,1000,4000] [--write]

A core with workers, all of which change each second, and four decisions a second that are
explained; in one process, without a network. Medians of the frames after the first two; the first
one has the whole state.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from command_line import section_parser
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded

from router.core.commands import Select

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from router.dashboard.board.board import Board
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus
from router.protocol.requests import SelectRequest
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

FRAMES = 12
DECISIONS = 4
FRAME_GOAL_MS, PAUSE_GOAL_MS = {1_000: 10.0}, 1.0
SECTIONS = {str(workers): f"{workers:,} workers" for workers in (16, 100, 1_000, 4_000)}


def rows(workers: int) -> list[Row]:
    """Return the figures of a frame; its whole time has a goal for 1,000 workers."""
    measured = [*_frames(workers)]
    frames = measured[2:]
    whole_ms, pause_ms = (1000 * median(each[i] for each in frames) for i in (0, 1))
    kib = median(each[2] for each in frames) / 1024
    note = f"the first, with the whole state: {1000 * measured[0][0]:.1f} ms"
    goal_ms = FRAME_GOAL_MS.get(workers)
    name = f"{workers:,} workers / "
    frame = Row(f"{name}a frame", whole_ms, whole_ms, "ms", 0.0, lower=False, note=note)
    if goal_ms:
        frame = Bounded(f"{name}a frame", whole_ms, goal_ms, "ms", goal_ms, lower=True, note=note)
    return [
        frame,
        Bounded(f"{name}longest pause", pause_ms, PAUSE_GOAL_MS, "ms", PAUSE_GOAL_MS, lower=True),
        Row(f"{name}size", kib, kib, "KiB", 0.0, lower=False),
    ]


def _frames(workers: int) -> Iterator[tuple[float, float, int]]:
    """Yield the seconds of each frame, those of its longest piece, and its bytes."""
    world, rng = World(default_policy="predictive"), Random(1)
    for worker_id in range(1, workers + 1):
        world.worker(worker_id)
    status = ServiceStatus("", needs_workers=True)
    board = Board("r", world.core, status, lambda: (0, 0, 0), EventTimeline(time.time))
    for second in range(FRAMES):
        for worker_id in range(1, workers + 1):
            world.cache(rank(worker_id), [rng.randrange(1 << 30) for _ in range(16)])
        for each in range(DECISIONS):
            request = SelectRequest(token_ids=[*range(4096)])
            placement = world.core.handle(Select(request, prepare(request, ())), float(second))[0]
            board.feed.take("select", request, placement, second + 0.25 * each, 0.0)
        yield _frame(board, float(second))


def _frame(board: Board, now_s: float) -> tuple[float, float, int]:
    pieces, before_s = [], time.thread_time()
    for _ in board.look(now_s):
        pieces.append(time.thread_time() - before_s)
        before_s = time.thread_time()
    size_bytes = len(board.frame(now_s, now_s))
    pieces.append(time.thread_time() - before_s)
    return sum(pieces), max(pieces), size_bytes


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    chosen = {
        name: Section(SECTIONS[name], partial(rows, int(name)))
        for name in arguments.only
        if not (arguments.quick and int(name) > 1_000)
    }
    scale = f"medians of {FRAMES - 2} frames, processor time of one thread"
    return report(chosen, Benchmark("dashboard", "goal", scale), arguments)


if __name__ == "__main__":
    sys.exit(main())

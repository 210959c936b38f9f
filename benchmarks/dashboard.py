"""What watching costs a router: processor's time and bytes of a frame, by workers.

`python benchmarks/dashboard.py [--workers N]`: a core with N workers, all of whom change, and four
decisions a second that are explained; in process, without a network.
"""

import argparse
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

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


def measure(workers: int) -> None:
    world, rng = World(default_policy="predictive"), Random(1)
    for worker_id in range(1, workers + 1):
        world.worker(worker_id)
    status = ServiceStatus("", needs_workers=True)
    board = Board("r", world.core, status, lambda: (0, 0, 0), EventTimeline(time.time))
    rows = []
    for second in range(FRAMES):
        for worker_id in range(1, workers + 1):
            world.cache(rank(worker_id), [rng.randrange(1 << 30) for _ in range(16)])
        for _ in range(DECISIONS):
            request = SelectRequest(token_ids=[*range(4096)])
            placement = world.core.handle(Select(request, prepare(request, ())), float(second))[0]
            board.feed.take("select", request, placement, second + 0.25 * _, 0.0)
        rows.append(frame(board, float(second)))
    whole, rest = rows[0], rows[2:]
    longest = median(row[1] for row in rest)
    print(
        f"{workers:6} workers: {1000 * median(r[0] for r in rest):6.1f} ms a frame, "
        f"longest pause {1000 * longest:5.2f} ms, {median(r[2] for r in rest) / 1024:6.1f} KiB; "
        f"the first {1000 * whole[0]:6.1f} ms; all {len(board.whole(0.0)) / 1024:6.1f} KiB"
    )


def frame(board: Board, now_s: float) -> tuple[float, float, int]:
    """Seconds in all, those of the longest piece, and bytes."""
    pieces, before_s = [], time.thread_time()
    for _ in board.look(now_s):
        pieces.append(time.thread_time() - before_s)
        before_s = time.thread_time()
    size_bytes = len(board.frame(now_s, now_s))
    pieces.append(time.thread_time() - before_s)
    return sum(pieces), max(pieces), size_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 100, 1_000, 4_000])
    for each in parser.parse_args().workers:
        measure(each)

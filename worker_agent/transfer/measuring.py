"""How fast a tier is, found out by writing and reading."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from worker_agent.offload.probe import TierProbe
from worker_agent.transfer.outcome import Outcome


def measured(
    rows: Tensor,
    write: Callable[[], Sequence[Outcome]],
    read: Callable[[int], Sequence[Outcome]],
) -> TierProbe | None:
    """All rows are written, then read, then the first again; None if anything fails."""
    times_s = [time.perf_counter()]
    written = write()
    times_s.append(time.perf_counter())
    arrived = read(len(rows))
    times_s.append(time.perf_counter())
    again = read(1)
    times_s.append(time.perf_counter())
    if {*written, *arrived, *again} != {Outcome.DONE}:
        return None
    return TierProbe.of(rows.numel(), len(rows), times_s)

"""What is asked of a fleet, and when."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace


class TraceRequest(Struct, frozen=True, gc=False):
    """One request: `sequence_hashes` name the full blocks of its prompt. `tenant`: who pays."""

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    sequence_hashes: list[int]
    tenant: str | None = None


class Trace(Struct, frozen=True):
    """Requests in order of arrival, all in blocks of one size."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]


def spread_arrivals(trace: Trace) -> Trace:
    """Requests of one moment come one behind the other, evenly, until the next moment: for traces
    whose moments are rounded. Those of the last moment stay. O(requests).
    """
    bursts = [list(burst) for _, burst in groupby(trace.requests, attrgetter("arrival_s"))]
    requests: list[TraceRequest] = []
    for burst, following in zip(bursts, [*bursts[1:], bursts[-1]], strict=True):
        gap_s = (following[0].arrival_s - burst[0].arrival_s) / len(burst)
        requests += (
            replace(request, arrival_s=request.arrival_s + gap_s * i)
            for i, request in enumerate(burst)
        )
    return Trace(trace.name, trace.block_size, requests)

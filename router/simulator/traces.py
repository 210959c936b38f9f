"""Request traces: requests in order of arrival, with their prompts as block hashes."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from router.errors import KvRouterError


class TraceError(KvRouterError):
    """A malformed line of a request trace, or one that contradicts the lines above it."""

    code = "trace"

    def __init__(self, line: int, field: str, reason: str, allowed: str) -> None:
        super().__init__(f"line {line}: {field}: {reason} (allowed: {allowed})")
        self.line = line
        self.field = field
        self.reason = reason
        self.allowed = allowed


class TraceRequest(Struct, frozen=True, gc=False):
    """One request. `sequence_hashes`: the full blocks of its prompt; `tenant`: its owner."""

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
    """Spread requests with equal arrival times evenly until the next arrival time.

    For traces with rounded times. Requests at the last time are unchanged. O(requests).
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

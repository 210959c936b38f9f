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
    """One request. `sequence_hashes`: the full blocks of its prompt; `tenant`: its owner.

    `after`: the requests, by their index in the trace, each smaller than its own, whose responses
    it waits for; it arrives `think_s` after the last of them has ended, and its `arrival_s` is that
    of its session. Empty: it arrives at `arrival_s`, whatever became of others. `session`: the
    number of the session, which may have several requests at a time. `slo_ttft_ms`, `slo_tpot_ms`:
    its objectives.
    """

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    sequence_hashes: list[int]
    tenant: str | None = None
    session: int | None = None
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


class Trace(Struct, frozen=True):
    """Requests in order of arrival, all in blocks of one size.

    Any number of its first requests is a trace as well.
    """

    name: str
    block_size: int
    requests: Sequence[TraceRequest]


class FollowUps:
    """The requests of a trace that wait for others, while it is replayed."""

    __slots__ = ("_followers", "_lost", "_pending")

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._pending = [len(request.after) for request in requests]
        self._lost: set[int] = set()
        self._followers: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            for earlier in request.after:
                self._followers.setdefault(earlier, []).append(index)

    def end(self, index: int) -> list[int]:
        """Return the requests that wait for no other any more, as this one has ended."""
        followers = self._followers.get(index, [])
        for follower in followers:
            self._pending[follower] -= 1
        return [each for each in followers if not self._pending[each] and each not in self._lost]

    def lose(self, index: int) -> list[int]:
        """Return the requests that never arrive, as this one was given up. Each is returned once.

        O(requests that depend on it).
        """
        lost, unseen = [], [index]
        while unseen:
            for follower in self._followers.get(unseen.pop(), []):
                if follower not in self._lost:
                    self._lost.add(follower)
                    lost.append(follower)
                    unseen.append(follower)
        return lost


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

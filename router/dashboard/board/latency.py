"""Measured times of sampled requests, beside what was predicted when they were placed.

    placed ─▶ begin ─▶ Timed    first token, end ─▶ report
                        └ its predictions are set when its decision is explained

Times begin with the placement. They are those of the reports that callers send: a request that ends
without a report of its first token was not streamed, or has failed.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

from msgspec import Struct

from router.core.commands import Free, OutputBlock, PrefillComplete
from router.protocol.replicas import PromptUsage
from router.protocol.values import Rank

OPEN = 1_024
"""The limit of requests that are followed at a time; the oldest is dropped."""

ENDED = 1_000
"""The number of ended requests that are remembered, for `MEMORY_S` at most; about 0.3 MB."""

MEMORY_S = 900.0
RECENT_S = 60.0
"""Times on the curves are means over this time."""

WORKERS = 20
"""The limit of workers with a row, those with the longest times to the first token first."""


class LatencyRow(Struct, frozen=True):
    """Means of the requests of a model, or of one worker, in seconds; null where none is known.

    `without_first_token`: of `requests`, those that ended without a report of one. A prediction is
    the mean of the same requests as the time beside it.
    """

    model_name: str
    worker_id: str | None
    requests: int
    without_first_token: int
    ttft_s: float | None
    predicted_ttft_s: float | None
    tpot_s: float | None
    predicted_tpot_s: float | None
    request_s: float | None


class Timed(Struct, eq=False):
    """A request that is followed: its times so far, from its placement on, and their predictions.

    `tpot_s`: time per output token after the first, if the caller reports how many there were.
    """

    model_name: str
    rank: Rank
    begun_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    request_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None


class Latencies:
    """The sampled requests, running and ended. `followed`: the running ones, by id."""

    __slots__ = ("_ended", "_first_tokens", "followed")

    def __init__(self) -> None:
        self.followed: OrderedDict[str, Timed] = OrderedDict()
        self._ended: deque[Timed] = deque(maxlen=ENDED)
        self._first_tokens: deque[Timed] = deque(maxlen=ENDED)

    def begin(self, request_id: str, model_name: str, rank: Rank, now_s: float) -> Timed:
        """Follow a placed request; the predictions are to be set in what is returned."""
        timed = self.followed[request_id] = Timed(model_name, rank, now_s)
        if len(self.followed) > OPEN:
            self.followed.popitem(last=False)
        return timed

    def report(self, command: PrefillComplete | OutputBlock | Free, now_s: float) -> None:
        """Note what a caller reports of a request; others than the followed are ignored. O(1)."""
        timed = self.followed.get(command.request_id)
        if timed is None:
            return
        if isinstance(command, PrefillComplete) and timed.ttft_s is None:
            timed.ttft_s = now_s - timed.begun_s
            self._first_tokens.append(timed)
        elif isinstance(command, Free):
            del self.followed[command.request_id]
            timed.request_s = now_s - timed.begun_s
            timed.tpot_s = _tpot_s(timed, command.usage)
            self._ended.append(timed)

    def recent(self, now_s: float) -> tuple[float | None, float | None]:
        """Return the mean time to the first token, as measured and as predicted. O(requests)."""
        since_s = now_s - RECENT_S
        times = [t for t in self._first_tokens if t.begun_s + (t.ttft_s or 0.0) >= since_s]
        return _mean(t.ttft_s for t in times), _mean(t.predicted_ttft_s for t in times)

    def rows(self, now_s: float) -> list[LatencyRow]:
        """Return a row for each model, and for its slowest workers. O(requests)."""
        while self._ended and _ended_s(self._ended[0]) < now_s - MEMORY_S:
            self._ended.popleft()
        models: dict[str, list[Timed]] = {}
        workers: dict[tuple[str, int], list[Timed]] = {}
        for timed in self._ended:
            models.setdefault(timed.model_name, []).append(timed)
            workers.setdefault((timed.model_name, timed.rank.worker_id), []).append(timed)
        rows = [_row(model, str(worker_id), each) for (model, worker_id), each in workers.items()]
        rows.sort(key=lambda row: (-(row.ttft_s or 0.0), -(row.request_s or 0.0)))
        return [*(_row(model, None, each) for model, each in models.items()), *rows[:WORKERS]]


def _row(model_name: str, worker_id: str | None, times: list[Timed]) -> LatencyRow:
    return LatencyRow(
        model_name,
        worker_id,
        len(times),
        sum(t.ttft_s is None for t in times),
        _mean(t.ttft_s for t in times),
        _mean(t.predicted_ttft_s for t in times if t.ttft_s is not None),
        _mean(t.tpot_s for t in times),
        _mean(t.predicted_tpot_s for t in times if t.tpot_s is not None),
        _mean(t.request_s for t in times),
    )


def _tpot_s(timed: Timed, usage: PromptUsage | None) -> float | None:
    """Return the time per output token after the first. Returns None if it is unknown."""
    tokens = None if usage is None else usage.output_tokens
    if tokens is None or tokens < 2 or timed.ttft_s is None or timed.request_s is None:
        return None
    return (timed.request_s - timed.ttft_s) / (tokens - 1)


def _ended_s(timed: Timed) -> float:
    return timed.begun_s + (timed.request_s or 0.0)


def _mean(times_s: Iterable[float | None]) -> float | None:
    known = [each for each in times_s if each is not None]
    return round(sum(known) / len(known), 6) if known else None

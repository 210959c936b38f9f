"""The last load report of a rank, and its expiry.

SGLang publishes messages `[b"load"][sequence][LoadStat]` on its load socket. Their counters cover
prefill only, and so does their time: Δtokens / Δtime is the measured prefill throughput. They
contain no steps and no decode work. Other engines: `metrics.py`.
"""

from collections.abc import Sequence

from msgspec import Struct, msgpack, structs

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges, TimedWork
from router.protocol.values import UNREADABLE, UInt

TOPIC = "load"
STALE_S = 3.0
_FRAMES = 3
_US_PER_S = 1_000_000


class LoadStat(Struct, frozen=True, array_like=True, tag="LoadStat"):
    """One load report of SGLang, as on the wire (0.5.23); newer fields are skipped."""

    num_running_reqs: UInt
    num_waiting_reqs: UInt
    num_tokens: UInt
    max_total_num_tokens: UInt
    attn_dp_rank: UInt | None = None
    num_waiting_uncached_tokens: UInt | None = None
    num_total_tokens: UInt | None = None
    max_running_requests: UInt | None = None
    total_prefill_uncached_tokens: UInt | None = None
    total_prefill_busy_us: UInt | None = None


_decoder = msgpack.Decoder(LoadStat)


class WorkSeen(Struct, frozen=True):
    """The counts of an engine's work beside `LoadCounters`, for `rate_windows.py`.

    `steps`: those that gave an output. `prompt_tokens`: computed for prompts with their first
    token. `admitted_tokens`: tokens to compute of prompts admitted, complete or not. `outputs`,
    `outputs_s`: outputs after the first, and the time that each of them took, summed over the
    requests. `preemptions`: of requests. `is_working`: it had requests, which used `used_tokens`
    tokens of its cache. `finished`: requests; of these, `finished_tokens` were computed in
    `finished_s`, the sum of the times of their prompts; `context_tokens`: the mean context of these
    tokens.
    """

    steps: int = 0
    prompt_tokens: int = 0
    admitted_tokens: int = 0
    outputs: int = 0
    outputs_s: float = 0.0
    preemptions: int = 0
    is_working: bool = False
    used_tokens: int = 0
    finished: int = 0
    finished_tokens: int = 0
    finished_s: float = 0.0
    context_tokens: float = 0.0


class EngineLoad(Struct, frozen=True):
    """A load report in this project's terms; values that the engine does not report are 0.

    `seen`: the counters of its work's duration, if it has them. `timed`: the same as work with a
    known duration, as in `PolledLoad`; None: `counters` have it.
    """

    gauges: LoadGauges = LoadGauges()
    counters: LoadCounters = LoadCounters()
    constants: LoadConstants = LoadConstants()
    seen: WorkSeen | None = None
    timed: tuple[TimedWork, ...] | None = None


class EngineLoads:
    """The last report of one rank. Reports of other ranks and garbage are counted and dropped."""

    __slots__ = (
        "_block_size",
        "_dp_rank",
        "_last",
        "_last_seen_s",
        "foreign",
        "garbage",
        "reports",
    )

    def __init__(self, dp_rank: int, block_size: int) -> None:
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._last = EngineLoad()
        self._last_seen_s = 0.0
        self.reports = 0
        self.foreign = 0
        self.garbage = 0

    def record(self, frames: Sequence[bytes], now_s: float) -> None:
        """Process a message of the load socket."""
        try:
            stat = _decoder.decode(frames[_FRAMES - 1]) if len(frames) == _FRAMES else None
        except UNREADABLE:
            stat = None
        if stat is None:
            self.garbage += 1
        elif stat.attn_dp_rank not in (None, self._dp_rank):
            self.foreign += 1
        else:
            self.note(_translated(stat, self._block_size), now_s)

    def note(self, load: EngineLoad, now_s: float) -> None:
        """Record a report that was read elsewhere."""
        self.reports += 1
        self._last_seen_s = now_s
        self._last = load

    def latest(self, now_s: float) -> EngineLoad:
        """Return the last report; without its gauges if it is older than `STALE_S`."""
        if now_s - self._last_seen_s <= STALE_S:
            return self._last
        return structs.replace(self._last, gauges=LoadGauges())


def _translated(stat: LoadStat, block_size: int) -> EngineLoad:
    return EngineLoad(
        LoadGauges(
            running_requests=stat.num_running_reqs,
            waiting_requests=stat.num_waiting_reqs,
            waiting_uncached_tokens=stat.num_waiting_uncached_tokens or 0,
            kv_used_blocks=-(-stat.num_tokens // block_size),
        ),
        LoadCounters(
            busy_s=(stat.total_prefill_busy_us or 0) / _US_PER_S,
            prefill_tokens=stat.total_prefill_uncached_tokens or 0,
        ),
        LoadConstants(
            max_running_requests=stat.max_running_requests or 0,
            num_blocks=stat.max_total_num_tokens // block_size,
        ),
    )

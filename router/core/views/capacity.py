"""The view of what each pool of workers is asked for and could serve. Read-only."""

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.core.capacity import Pool, PoolMembers
from router.core.core import RouterCore
from router.protocol.capacity import Confidence, PoolCapacity, RankCapacity, RecentRequest
from router.protocol.values import Rank
from router.scheduler.capacity.arrivals import (
    EXPECTED_TOKENS,
    EXPECTING,
    ISL_TOKENS,
    REQUESTS,
    TOKENS,
)
from router.scheduler.capacity.demand import Demand, PoolRanks, demand_on
from router.scheduler.policy._predicted_parts import QUEUE_S, ROOM_S
from router.scheduler.policy.predictive import predicted_parts
from router.scheduler.terms import (
    CACHED_BLOCKS,
    COLUMNS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
    FloatArray,
    TermTable,
)
from router.sequence import rank_table as table

UNCERTAIN = 0.3
"""Relative standard error of predicted times above which rates are called uncertain."""

BESIDE = 1.5
"""Factor between the requests that engines report and those booked above which this is a reason."""

_NO_WORKER = "no schedulable worker"
_UNMEASURED = "no work of this model was measured yet"
_NO_OUTPUT = "output lengths unknown: engines report none, callers expect none"


class _Seen(Struct, frozen=True, eq=False):
    """A pool as it is now: its workers, the rows of all their ranks, and what arrived lately.

    `output_tokens`: of a usual request; None if unknown. `waiting`: requests, and their tokens.
    """

    pool: Pool
    members: PoolMembers
    ranks: list[Rank]
    rows: FloatArray
    is_schedulable: npt.NDArray[np.bool_]
    recent: FloatArray
    length_s: float
    output_tokens: float | None
    waiting: tuple[int, int]

    @property
    def active_requests(self) -> int:
        """The number of booked requests."""
        return int(self.rows[:, table.REQUESTS].sum())


def capacity(core: RouterCore, now_s: float) -> list[PoolCapacity]:
    """Return the capacity of every pool that has or had workers. O(ranks)."""
    pools = core.capacity.pools(now_s)
    return [_pool_capacity(core, _seen(core, pool, now_s), now_s) for pool in pools]


def _seen(core: RouterCore, pool: Pool, now_s: float) -> _Seen:
    members = core.capacity.members(pool)
    rows = core.ranks.values[members.slots]
    ranks = [rank for each in members.workers for rank in each.ranks]
    schedulable = [core.fleet.is_schedulable(each) for each in members.workers for _ in each.ranks]
    recent, length_s = core.capacity.arrivals(pool).recent(now_s)
    are, output_tokens = np.array(schedulable, bool), _output_tokens(pool, rows, recent)
    waiting = core.waiting.usage(pool.scope)
    return _Seen(pool, members, ranks, rows, are, recent, length_s, output_tokens, waiting)


def _output_tokens(pool: Pool, rows: FloatArray, recent: FloatArray) -> float | None:
    """Return the number of output tokens of a request after its first.

    As engines report, else as callers expect. Returns None if neither is known.
    """
    if pool.role == "prefill":
        return 0.0
    weights = rows[:, table.REQUESTS_PER_S] * (rows[:, table.OUTPUT_TOKENS] > 0)
    if weights.sum():
        return float((rows[:, table.OUTPUT_TOKENS] * weights).sum() / weights.sum())
    if recent[EXPECTING]:
        return float(max(recent[EXPECTED_TOKENS] / recent[EXPECTING] - 1.0, 0.0))
    return None


def _pool_capacity(core: RouterCore, seen: _Seen, now_s: float) -> PoolCapacity:
    confidence, reasons = _confidence(core, seen, now_s)
    demand = _demand(core, seen, now_s) if confidence != "unknown" else None
    settings, pool, workers = core.capacity.settings, seen.pool, seen.members.workers
    parts = _predicted(core, seen, now_s) if confidence != "unknown" else None
    loads = _loads(seen, demand, parts)
    return PoolCapacity(
        model_name=pool.scope.model_name,
        routing_group=pool.scope.routing_group,
        role=pool.role,
        workers=len(workers),
        schedulable_workers=sum(map(core.fleet.is_schedulable, workers)),
        ranks=len(seen.ranks),
        schedulable_ranks=len(seen.rows[seen.is_schedulable]),
        window_s=settings.window_s,
        target_saturation=settings.target_saturation,
        confidence=confidence,
        reasons=reasons,
        requests_per_s=_rounded((seen.recent[REQUESTS] + seen.waiting[0]) / seen.length_s),
        mean_request=_mean_request(seen, demand),
        booked_s=_sum([each.booked_s for each in loads]),
        predicted_wait_s=_wait_s(seen, parts),
        active_requests=seen.active_requests,
        waiting_requests=seen.waiting[0],
        waiting_isl_tokens=seen.waiting[1],
        loads=loads,
        **_memory(seen),
        **_demanded(seen, demand),
    )


# ── What is known ────────────────────────────────────────────────────────────────────────────────


def _confidence(core: RouterCore, seen: _Seen, now_s: float) -> tuple[Confidence, list[str]]:
    """Return how far the figures can be trusted, and the reasons if that is not fully."""
    unknown = _lacking(core, seen)
    if unknown:
        return "unknown", unknown
    doubts = _doubts(core, seen, now_s)
    return ("learning" if doubts else "measured"), doubts


def _lacking(core: RouterCore, seen: _Seen) -> list[str]:
    """Return what is lacking to know the demand in seconds."""
    if not seen.is_schedulable.any():
        return [_NO_WORKER]
    if not (seen.recent[REQUESTS] or seen.waiting[0] or seen.active_requests):
        return []
    is_measured = core.predictor.is_measured(seen.pool.scope.model_name)
    lacking = [] if is_measured else [_UNMEASURED]
    return lacking if seen.output_tokens is not None else [*lacking, _NO_OUTPUT]


def _doubts(core: RouterCore, seen: _Seen, now_s: float) -> list[str]:
    """Return why the demand in seconds may be another."""
    doubts, rows = [], seen.rows[seen.is_schedulable]
    if not core.capacity.arrivals(seen.pool).is_whole(now_s):
        doubts.append(f"observed for less than a window of {core.capacity.settings.window_s:g} s")
    error = float(rows[:, table.RATE_ERROR].mean())
    if error > UNCERTAIN:
        doubts.append(f"predicted times are uncertain by {error:.0%}")
    reported = float(seen.rows[:, table.REQUESTS_PER_S].sum())
    booked = seen.recent[REQUESTS] / seen.length_s
    if reported > BESIDE * booked + 1.0 / seen.length_s:
        doubts.append(f"engines report {reported:.3g} requests/s, and {booked:.3g} are booked")
    if not rows[:, table.CAPACITY_BLOCKS].all():
        doubts.append("KV capacity of some ranks unknown: their steps are not counted")
    return doubts


def _demand(core: RouterCore, seen: _Seen, now_s: float) -> Demand:
    schedulable = [each for each in seen.members.workers if core.fleet.is_schedulable(each)]
    numbers = np.repeat(np.arange(len(schedulable)), [len(each.ranks) for each in schedulable])
    limits = [each.most_running(rank) for each in schedulable for rank in each.ranks]
    rows, output_tokens = seen.rows[seen.is_schedulable], seen.output_tokens or 0.0
    ranks = PoolRanks(rows, numbers, np.array(limits, float), output_tokens)
    arrivals, target = core.capacity.arrivals(seen.pool), core.capacity.settings.target_saturation
    return demand_on(ranks, arrivals, seen.waiting[0], seen.active_requests, target, now_s)


# ── Parts of the reply ───────────────────────────────────────────────────────────────────────────


def _demanded(seen: _Seen, demand: Demand | None) -> dict[str, Any]:
    """Return the fields that depend on the demand, which may be unknown."""
    supply_s, per_s = float(seen.is_schedulable.sum()), None
    if demand is None:
        fields = dict.fromkeys(_OF_DEMAND)
        if not supply_s:  # one worker is needed, whatever it can serve
            is_asked = bool(seen.recent[REQUESTS] or seen.waiting[0])
            fields |= _workers(0, int(is_asked), 0, int(is_asked))
        return {**fields, "supply_s_per_s": supply_s}
    if demand.most_requests_per_s is not None:
        per_s = max(float(demand.most_requests_per_s.sum()) - demand.requests_per_s, 0.0)
    return {
        "supply_s_per_s": supply_s,
        "demand_s_per_s": _rounded(demand.saturation * supply_s),
        "saturation": _rounded(demand.saturation),
        "peak_saturation": _rounded(demand.peak_saturation),
        "headroom_s_per_s": _rounded(max(1.0 - demand.saturation, 0.0) * supply_s),
        "headroom_requests_per_s": _rounded(per_s),
        **_workers(demand.workers, demand.needed, demand.spare, demand.lacking),
    }


_OF_DEMAND = (
    "demand_s_per_s",
    "saturation",
    "peak_saturation",
    "headroom_s_per_s",
    "headroom_requests_per_s",
    "workers_needed",
    "workers_that_would_be_missed",
    "workers_spare",
    "workers_wanted",
)


def _workers(workers: int, needed: int, spare: int, lacking: int) -> dict[str, int]:
    return {
        "workers_needed": needed,
        "workers_that_would_be_missed": min(needed, workers),
        "workers_spare": spare,
        "workers_wanted": lacking,
    }


def _mean_request(seen: _Seen, demand: Demand | None) -> RecentRequest | None:
    requests = seen.recent[REQUESTS]
    if not requests:
        return None
    isl_tokens, tokens = seen.recent[[ISL_TOKENS, TOKENS]] / requests
    seconds = None if demand is None else demand.seconds_per_request
    sizes = (_rounded(isl_tokens), _rounded(tokens), _rounded(seen.output_tokens))
    return RecentRequest(*sizes, _rounded(seconds))


def _memory(seen: _Seen) -> dict[str, Any]:
    """Return the blocks of running requests against the capacity; null if that is not known."""
    known = seen.rows[seen.rows[:, table.CAPACITY_BLOCKS] > 0]
    if not len(known) or len(known) < len(seen.rows):
        return dict.fromkeys(("kv_booked_blocks", "kv_capacity_blocks", "kv_usage"))
    booked = int(known[:, table.DECODE_BLOCKS].sum())
    blocks = int(known[:, table.CAPACITY_BLOCKS].sum())
    usage = _rounded(booked / blocks)
    return {"kv_booked_blocks": booked, "kv_capacity_blocks": blocks, "kv_usage": usage}


def _predicted(core: RouterCore, seen: _Seen, now_s: float) -> FloatArray:
    """Return the parts of a new mean request's times on each rank, as `predictive` predicts them.

    Without requests in the window: those of a request of one token.
    """
    requests = max(seen.recent[REQUESTS], 1.0)
    isl_tokens = max(int(seen.recent[ISL_TOKENS] / requests), 1)
    tokens = min(max(seen.recent[TOKENS] / requests, 1.0), isl_tokens)
    terms = np.zeros((len(seen.rows), COLUMNS))
    terms[:, : table.RANK_COLUMNS] = seen.rows
    block_sizes = np.maximum(seen.rows[:, table.BLOCK_SIZE], 1.0)[:, None]
    terms[:, OVERLAP_DEVICE : OVERLAP_REMOTE + 1] = (isl_tokens - tokens) / block_sizes
    terms[:, CACHED_BLOCKS] = terms[:, OVERLAP_DEVICE]
    terms[:, [NEW_BLOCKS]] = tokens / block_sizes
    terms[:, TAINT_FACTOR] = 1.0
    output_tokens = round(seen.output_tokens or 0.0)
    scope = seen.pool.scope
    of_one = TermTable(scope, seen.ranks, terms, isl_tokens, output_tokens, now_s)
    return predicted_parts(of_one, core.settings.policy)


def _wait_s(seen: _Seen, parts: FloatArray | None) -> float | None:
    if parts is None or not seen.recent[REQUESTS]:
        return None
    waits_s = (parts[:, QUEUE_S] + parts[:, ROOM_S])[seen.is_schedulable]
    return round(float(waits_s.min()), 6)


def _loads(seen: _Seen, demand: Demand | None, parts: FloatArray | None) -> list[RankCapacity]:
    """Return the booked work of each rank."""
    count = len(seen.ranks)
    queue_s: list[float] = [] if parts is None else parts[:, QUEUE_S].tolist()
    most = np.full(count, np.nan)
    if demand is not None and demand.most_requests_per_s is not None:
        most[seen.is_schedulable] = demand.most_requests_per_s
    decode_s = _decode_s(seen).tolist()
    return [
        RankCapacity(
            rank.worker_id,
            rank.dp_rank,
            bool(seen.is_schedulable[i]),
            int(seen.rows[i, table.REQUESTS]),
            _rounded(queue_s[i]) if queue_s else None,
            _rounded(queue_s[i] + decode_s[i]) if queue_s else None,
            None if np.isnan(most[i]) else _rounded(float(most[i])),
        )
        for i, rank in enumerate(seen.ranks)
    ]


def _decode_s(seen: _Seen) -> FloatArray:
    """Return the seconds that the output of the booked requests still takes, on each rank.

    Those that decode are halfway on average; all of a rank decode together.
    """
    rows, output = seen.rows, seen.output_tokens or 0.0
    decoding = np.maximum(rows[:, table.DECODING_REQUESTS] + rows[:, table.FOREIGN_REQUESTS], 0.0)
    queued = rows[:, table.REQUESTS] - rows[:, table.DECODING_REQUESTS]
    isl_tokens = seen.recent[ISL_TOKENS] / max(seen.recent[REQUESTS], 1.0)
    steps = np.where(queued > 0, output, np.where(decoding > 0, output / 2, 0.0))
    tokens = decoding * output / 2 + queued * output
    resident = rows[:, table.DECODING_KV_TOKENS] * output / 2
    resident = resident + queued * output * (isl_tokens + output / 2)
    busy_s: FloatArray = steps * rows[:, table.BASE_S] + tokens * rows[:, table.DECODE_S]
    busy_s += resident * rows[:, table.KV_S]
    return busy_s


def _sum(numbers: list[float | None]) -> float | None:
    known = [each for each in numbers if each is not None]
    return round(sum(known), 6) if len(known) == len(numbers) else None


def _rounded(number: Any) -> Any:
    """Return a number with six decimals, or None."""
    return None if number is None else round(float(number), 6)

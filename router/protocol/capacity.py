"""The reply to `GET /capacity`: what each pool of workers is asked for, and could serve."""

from typing import Literal, TypeAlias

from msgspec import Struct

from router.protocol.values import Role

Confidence: TypeAlias = Literal["measured", "learning", "unknown"]
"""`learning`: from rates that are uncertain, or less than a window; `unknown`: null instead."""


class RankCapacity(Struct, frozen=True, gc=False):
    """The booked work of one rank, in its predicted seconds, and what it can serve.

    `queue_s`: until it would begin with a new prompt. `booked_s`: until all booked work is done.
    `most_requests_per_s`: requests of the recent mean size that it can serve at most.
    """

    worker_id: int
    dp_rank: int
    is_schedulable: bool
    active_requests: int
    queue_s: float | None
    booked_s: float | None
    most_requests_per_s: float | None


class RecentRequest(Struct, frozen=True, gc=False):
    """The mean request of the window.

    `isl_tokens`: of its prompt; `uncached_tokens`: those of them to compute; `output_tokens`: null
    if neither engines nor callers say. `seconds`: of a rank that works all the time with as many
    requests as fit.
    """

    isl_tokens: float
    uncached_tokens: float
    output_tokens: float | None
    seconds: float | None


class PoolCapacity(Struct, frozen=True, kw_only=True, gc=False):
    """The demand on the workers of one model, routing group and role, and their supply.

    Null: unknown, for one of the `reasons`. Averages are those of the last `window_s`.

    `requests_per_s`: booked in the window, and waiting now. `demand_s_per_s`: seconds of a rank
    that those take, per second; `supply_s_per_s`: one for each schedulable rank; `saturation`: the
    first, divided by the second; `peak_saturation`: the highest of the last six windows, by present
    supply. `headroom_*`: supply that is not in demand, also as requests of the mean size.
    `booked_s`: sum over ranks. `predicted_wait_s`: of a new mean request on the rank where it is
    shortest. `kv_usage`: blocks of all booked requests, as a fraction of `kv_capacity_blocks`;
    above 1 if not all of them can run at once.

    `workers_needed`: the fewest workers with a saturation of at most `target_saturation`:
    `workers_that_would_be_missed` of those that are schedulable, and `workers_wanted` more;
    `workers_spare` could go, whichever they are, by the peak.
    """

    model_name: str
    routing_group: str
    role: Role
    workers: int
    schedulable_workers: int
    ranks: int
    schedulable_ranks: int
    window_s: float
    target_saturation: float
    confidence: Confidence
    reasons: list[str]
    requests_per_s: float
    mean_request: RecentRequest | None
    demand_s_per_s: float | None
    supply_s_per_s: float
    saturation: float | None
    peak_saturation: float | None
    headroom_s_per_s: float | None
    headroom_requests_per_s: float | None
    booked_s: float | None
    predicted_wait_s: float | None
    active_requests: int
    waiting_requests: int
    waiting_isl_tokens: int
    kv_booked_blocks: int | None
    kv_capacity_blocks: int | None
    kv_usage: float | None
    workers_needed: int | None
    workers_that_would_be_missed: int | None
    workers_spare: int | None
    workers_wanted: int | None
    loads: list[RankCapacity]

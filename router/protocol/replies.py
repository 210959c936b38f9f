"""What callers are told, over HTTP and NATS. Overlap is raw; `predicted_cached_blocks` is what the
engine will really reuse, since it always computes at least one prompt token.
"""

import enum
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from router.placement_errors import RemovedRanks
from router.protocol.values import DpRank, UInt


class TrustState(enum.StrEnum):
    """How far the index of a rank can be believed."""

    EXACT = "exact"
    LAGGING = "lagging"
    DEGRADED = "degraded"
    BLIND = "blind"


class Trust(Struct, frozen=True):
    """How far a rank's index, which stands at `event_id`, can be believed to equal its cache.

    `age_s`: how long ago it is known that there was nothing newer; None where it never was.
    """

    state: TrustState
    event_id: int
    age_s: float | None
    reason: str | None = None


class OverlapTokens(Struct, frozen=True):
    """Cached prefix of the chosen worker in tokens, cumulative over tiers; `dp`: of each rank."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    remote: int
    dp: dict[str, int]


class Candidate(Struct, frozen=True):
    """One rank's terms in a decision. `cost` is the policy's, lower is better.

    `trusted_overlap_blocks`: the overlap, weighed by the trust in it, as policies that predict
    count it; `dynamo-1.0` counts the raw one.
    """

    worker_id: int
    dp_rank: int
    cost: float
    overlap_blocks: int
    trusted_overlap_blocks: float
    predicted_cached_blocks: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    held_blocks: int
    trust: Trust


class LearnedRates(Struct, frozen=True):
    """Seconds that a step of an engine takes, and what each kind of work adds to it."""

    step_s: float
    prompt_token_s: float
    prompt_token_context_s: float
    decode_request_s: float
    kv_token_s: float


class PredictedSeconds(Struct, frozen=True):
    """What a placement is predicted to take, whatever the policy goes by; see `predictive`.

    Time to the first token: until the engine begins (`queue_s`), has room (`room_s`) and has
    computed the prompt (`prefill_s`). Then `stream_s` to the last token. To others: `delay_s` of
    those there, `future_s` of those to come, `pushed_s` to compute again what leaves the cache.
    `relative_error`: one standard error, as a fraction.
    """

    time_to_first_token_s: float
    queue_s: float
    room_s: float
    prefill_s: float
    stream_s: float
    delay_s: float
    future_s: float
    pushed_s: float
    relative_error: float
    rates: LearnedRates


class ExplainedCandidate(Candidate, frozen=True):
    """One rank's terms in a decision that was to be explained.

    `parts` sum to `cost`; `chance` is how likely the rank was to be chosen by these costs, null
    where the policy does not say. Blocks are of the prompt's leading ones, cumulative over tiers.
    """

    parts: dict[str, float]
    chance: float | None
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    remote_blocks: int
    trust_weight: float
    active_requests: int
    predicted: PredictedSeconds


class Explanation(Struct, frozen=True):
    """By what a decision was made: the policy's settings, the request's own among them, and who
    was no candidate.
    """

    settings: dict[str, Any]
    removed: list[RemovedRanks]


class WorkerLoad(Struct, frozen=True):
    """The load of a chosen rank, as it was booked before this request, and what it can take."""

    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int
    active_decode_blocks: int = 0


SharedTier: TypeAlias = Literal["device", "host_pinned"]
"""Where blocks lie that workers give each other."""


class BlockSource(Struct, frozen=True):
    """Where an engine can have more of a prompt than it holds: for the engine, not for the caller.

    `blocks`: leading ones of the prompt, counted from its start, that this rank has and gives to
    others; `tier`: the slower of those they lie in, `device` or `host_pinned`.
    """

    worker_id: UInt
    dp_rank: DpRank
    blocks: UInt
    tier: SharedTier


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank for a prompt, and why. `waited_s`: in the queue, where it had to.

    `source`: another rank, which holds more of the prompt than the chosen one does in all its
    tiers, where both share their blocks; send it to the engine as `kv_transfer_params.source`.

    `selection_id`: under which it may be booked, or is. Of bookings: `sequence_hashes`, signed, are
    what names its full blocks in them, and `track_prefill_tokens` says whether its prefill counts.
    `worker_load`: where the request is `advisory`.
    """

    selection_id: str | None = None
    sequence_hashes: list[int] | None = None
    track_prefill_tokens: bool | None = None
    request_id: str | None = None
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    isl_tokens: int
    overlap: OverlapTokens
    overlap_blocks: int
    predicted_cached_blocks: int
    effective_prefill_tokens: int
    potential_decode_blocks: int
    policy: str
    trust: Trust
    waited_s: float = 0.0
    source: BlockSource | None = None
    worker_load: WorkerLoad | None = None
    candidates: list[ExplainedCandidate] | None = None
    explanation: Explanation | None = None


class ReservationReply(Struct, frozen=True):
    """A booking was made. `selection_id`: its id, as selections are called."""

    selection_id: str
    request_id: str
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str


class PotentialLoad(Struct, frozen=True):
    """The booked load of a rank, with the prompt in question where there is one."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class ScopeLoads(Struct, frozen=True):
    """The booked load of every rank of a scope."""

    model_name: str
    routing_group: str
    loads: list[PotentialLoad]
    pending_count: int = 0
    pending_isl_tokens: int = 0


class RankOverlap(Struct, frozen=True):
    """Cached prefix of one rank in blocks of its own size; host, disk, remote are cumulative.

    `num_blocks`: of the prompt; `predicted_cached_blocks`: what the engine will not compute.
    """

    worker_id: int
    dp_rank: int
    block_size: int
    num_blocks: int
    predicted_cached_blocks: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    remote_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    trust: Trust
    shared_beyond_device_blocks: int | None = None


class SharedCache(Struct, frozen=True):
    """A cache that ranks share, which Dynamo's service can ask; there is none here."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[tuple[int, int]] = []
    error: str | None = None


class OverlapScoresReply(Struct, frozen=True):
    """Cached prefix of every rank of a scope; block_size and num_blocks are the first worker's."""

    block_size: int
    num_blocks: int
    workers: list[RankOverlap]
    shared_cache: SharedCache = SharedCache()


class NewReply(Struct, frozen=True, tag_field="method", tag="new", omit_defaults=True):
    """NATS: where the request was booked; `source`: see `Decision`."""

    request_id: str
    worker_id: int
    dp_rank: int
    overlap_blocks: int
    predicted_cached_blocks: int
    endpoint: str
    source: BlockSource | None = None


class PrefillMarkedReply(Struct, frozen=True, tag_field="method", tag="prefill_marked"):
    """NATS: answer to `mark_prefill`."""

    success: bool


class FreeMarkedReply(Struct, frozen=True, tag_field="method", tag="free_marked"):
    """NATS: answer to `mark_free`."""

    success: bool


class PotentialLoadsReply(Struct, frozen=True, tag_field="method", tag="potential_loads"):
    """NATS: answer to `potential_loads`."""

    loads: list[PotentialLoad]
    pending_count: int = 0
    pending_isl_tokens: int = 0


Reply: TypeAlias = NewReply | PrefillMarkedReply | FreeMarkedReply | PotentialLoadsReply

"""Replies to callers, over HTTP and NATS.

Overlap is raw; `predicted_cached_blocks` is the part that the engine really reuses, since it always
computes at least one prompt token.
"""

import enum
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from router.protocol.values import DpRank, UInt

WARNINGS_HEADER = b"x-kv-router-warnings"
"""The header with warnings, a JSON array, of responses that are not JSON objects."""


class RemovedRanks(Struct, frozen=True):
    """The number of ranks that a filter removed, and the first of them."""

    filter: str
    count: int
    ranks: list[str]

    def __str__(self) -> str:
        more = f" and {self.count - len(self.ranks)} more" if self.count > len(self.ranks) else ""
        return f"{self.filter} removed {', '.join(self.ranks)}{more}"


class TrustState(enum.StrEnum):
    """The reliability of a rank's index."""

    EXACT = "exact"
    LAGGING = "lagging"
    DEGRADED = "degraded"
    APPROXIMATE = "approximate"
    BLIND = "blind"
    UNREACHABLE = "unreachable"


class Trust(Struct, frozen=True, gc=False):
    """The reliability of a rank's index, compared with its cache.

    `approximate`: without events, estimated from bookings; `blind`: nothing is known;
    `unreachable`: neither its server nor its event sockets ever answered, and it is not chosen.

    `event_id`: the last event in the index. `age_s`: the time since the index was last known to be
    up to date; None if it never was.
    """

    state: TrustState
    event_id: int
    age_s: float | None
    reason: str | None = None


class OverlapTokens(Struct, frozen=True, gc=False):
    """The cached prefix of the chosen worker in tokens, cumulative over tiers.

    `dp`: of each rank.
    """

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    remote: int
    dp: dict[str, int]


class Candidate(Struct, frozen=True, gc=False):
    """The terms of one rank in a decision.

    `cost` is the policy's; lower is better.

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


class LearnedRates(Struct, frozen=True, gc=False):
    """The duration of an engine's step in seconds, and what each kind of work adds to it."""

    step_s: float
    prompt_token_s: float
    prompt_token_context_s: float
    decode_request_s: float
    kv_token_s: float


class PredictedSeconds(Struct, frozen=True, gc=False):
    """The predicted duration of a placement, for every policy; see `predictive`.

    Time to the first token: until the engine begins (`queue_s`), has room (`room_s`) and has
    computed the prompt (`prefill_s`). `stream_s`: from then to the last token. Effects on other
    requests: a delay of `delay_s` in all for present ones, of `future_s` for future ones, and
    `pushed_s` to recompute blocks evicted from the cache. `missed_s`: the price of objectives that
    are missed, of this request or of booked ones. `time_per_output_token_s`: with the prompts that
    are computed in between. `relative_error`: one standard error, as a fraction.
    """

    time_to_first_token_s: float
    queue_s: float
    room_s: float
    prefill_s: float
    stream_s: float
    delay_s: float
    future_s: float
    pushed_s: float
    missed_s: float
    time_per_output_token_s: float
    relative_error: float
    rates: LearnedRates


class ExplainedCandidate(Candidate, frozen=True, gc=False):
    """The terms of one rank in a decision with `explain`.

    `parts` sum to `cost`. `chance`: the probability of choosing the rank by these costs, null if
    the policy does not define one. Blocks are leading blocks of the prompt, cumulative over tiers.
    `resumption`: on ranks with a hybrid model, whose blocks are those from which the prompt can be
    resumed: how these compare with the blocks of full attention.
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
    resumption: str | None = None


class Explanation(Struct, frozen=True):
    """The basis of a decision: settings of the policy and the request, and removed ranks."""

    settings: dict[str, Any]
    removed: list[RemovedRanks]


class WorkerLoad(Struct, frozen=True):
    """The load of a chosen rank, as booked before this request, and its capacity."""

    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int
    active_decode_blocks: int = 0


SharedTier: TypeAlias = Literal["device", "host_pinned"]
"""The tiers of blocks that workers share."""


class RemoteKvSource(Struct, frozen=True):
    """The side channel of a vLLM's own P2P tier, in vLLM's words."""

    remote_host: str
    remote_port: int


class BlockSource(Struct, frozen=True, omit_defaults=True):
    """A rank from which the engine can load more of a prompt than it holds.

    It is meant for the engine, not for the caller. `blocks`: leading blocks of the prompt, counted
    from its start, that this rank has and shares. `tier`: the slower of the tiers they are in,
    `device` or `host_pinned`. `remote_kv_source`: set if both ranks share blocks by vLLM's own P2P
    tier: it is what their engine understands, together with a `kv_request_id` of the caller's,
    another one for each request.
    """

    worker_id: UInt
    dp_rank: DpRank
    blocks: UInt
    tier: SharedTier
    remote_kv_source: RemoteKvSource | None = None


SplitKey: TypeAlias = Literal["session", "prompt", "worker"]


class SplitChoice(Struct, frozen=True, omit_defaults=True):
    """The choice of a routing group by a split (`group_splits`).

    `asked_group`: the group that the request names. `by`: the session or the beginning of the
    prompt, whose hash chose; or the worker or selection that the request names. `share`: of the
    requests that get this group. `skipped`: groups that had no worker for the request.
    """

    asked_group: str
    routing_group: str
    by: SplitKey
    share: float
    skipped: tuple[str, ...] = ()


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A rank for a prompt, with the reasons.

    `waited_s`: time in the queue.

    `source`: another rank, which holds more of the prompt than the chosen one does in all its
    tiers, if both share their blocks by the same protocol; send it to the engine as
    `kv_transfer_params.source`, or, if it has a `remote_kv_source`, that with a `kv_request_id` of
    its own as `kv_transfer_params.remote_kv_source`.

    `selection_id`: the id under which it may be booked, or is. `sequence_hashes`: for bookings, the
    signed hashes of its full blocks. `track_prefill_tokens`: for bookings, whether its prefill
    counts. `worker_load`: set if the request is `advisory`. `warnings`: sentences about fields of
    the request without effect. `split`: set if the group that the request names is split.
    """

    selection_id: str | None = None
    sequence_hashes: Sequence[int] | None = None
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
    warnings: tuple[str, ...] = ()
    split: SplitChoice | None = None


class ReservationReply(Struct, frozen=True, omit_defaults=True):
    """A completed booking.

    `selection_id`: the id of the booking. `warnings`: see `Decision`.
    """

    selection_id: str
    request_id: str
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str
    warnings: tuple[str, ...] = ()


class PotentialLoad(Struct, frozen=True, gc=False):
    """The booked load of a rank, including the prompt of the query if there is one."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class LoadForecast(Struct, frozen=True):
    """The load of every rank, with a prompt. `warnings`: see `Decision`.

    Over HTTP the body is `loads`, and `warnings` is a header.
    """

    loads: list[PotentialLoad]
    warnings: tuple[str, ...] = ()


class ServedName(Struct, frozen=True):
    """A further name that workers of a model serve: an alias, or an adapter."""

    name: str
    is_adapter: bool
    worker_ids: list[int]


class ScopeLoads(Struct, frozen=True):
    """The booked load of every rank of a scope.

    `names`: further names that its workers serve; `max_model_len`: the shortest limit of prompt and
    response together, in tokens. Both are absent unless workers announce them. `split_from`: groups
    whose requests may come here (`group_splits`); absent if there are none.
    """

    model_name: str
    routing_group: str
    loads: list[PotentialLoad]
    pending_count: int = 0
    pending_isl_tokens: int = 0
    names: list[ServedName] | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    split_from: list[str] | UnsetType = UNSET


class RankOverlap(Struct, frozen=True, gc=False):
    """The cached prefix of one rank in blocks of its own size; host, disk, remote are cumulative.

    `num_blocks`: blocks of the prompt. `predicted_cached_blocks`: blocks that the engine will not
    compute. `resumable_tokens`: of ranks with a hybrid model, whose other figures are those of full
    attention: the prefix from which the other layers let the prompt be resumed.
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
    resumable_tokens: int | None = None


class SharedCache(Struct, frozen=True):
    """A cache shared by ranks, for compatibility with Dynamo's service; this router has none."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[tuple[int, int]] = []
    error: str | None = None


class OverlapScoresReply(Struct, frozen=True):
    """The cached prefix on every rank of a scope.

    `block_size` and `num_blocks` are the first worker's. `split`: as in `Decision`.
    """

    block_size: int
    num_blocks: int
    workers: list[RankOverlap]
    shared_cache: SharedCache = SharedCache()
    split: SplitChoice | UnsetType = UNSET


class NewReply(Struct, frozen=True, tag_field="method", tag="new", omit_defaults=True):
    """NATS: the rank where the request was booked. `source`, `warnings`: see `Decision`."""

    request_id: str
    worker_id: int
    dp_rank: int
    overlap_blocks: int
    predicted_cached_blocks: int
    endpoint: str
    source: BlockSource | None = None
    warnings: tuple[str, ...] = ()


class PrefillMarkedReply(Struct, frozen=True, tag_field="method", tag="prefill_marked"):
    """NATS: the reply to `mark_prefill`."""

    success: bool


class FreeMarkedReply(Struct, frozen=True, tag_field="method", tag="free_marked"):
    """NATS: the reply to `mark_free`."""

    success: bool


class PotentialLoadsReply(Struct, frozen=True, tag_field="method", tag="potential_loads"):
    """NATS: the reply to `potential_loads`. `warnings`: see `Decision`; absent without any."""

    loads: list[PotentialLoad]
    pending_count: int = 0
    pending_isl_tokens: int = 0
    warnings: tuple[str, ...] | UnsetType = UNSET

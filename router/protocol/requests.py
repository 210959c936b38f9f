"""Requests of callers over HTTP; over NATS the same, as `commands.py` tags them.

Unknown fields are ignored.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from router.protocol.values import (
    U32_MAX,
    U64,
    U64_MAX,
    BlockHash,
    DpRank,
    Name,
    Phase,
    Rank,
    Scope,
    Taint,
    TokenCount,
    TokenId,
    UInt,
)

RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
SessionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
MOST_MS = 86_400_000
Unmet: TypeAlias = Literal["refuse", "place"]
Milliseconds: TypeAlias = Annotated[float, Meta(gt=0, le=MOST_MS)]
TaintWeight: TypeAlias = Annotated[float, Meta(ge=-1e9, le=1e9)]


class MmObject(Struct, frozen=True):
    """A multimodal object that touches a block; offsets are carried, not hashed."""

    mm_hash: U64
    offsets: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        if self.mm_hash > U64_MAX:
            raise ValueError(f"Expected `int` <= {U64_MAX}")


class BlockMmInfo(Struct, frozen=True):
    """The multimodal objects of one block."""

    mm_objects: list[MmObject] = []


Weight: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


class ConfigOverride(Struct, frozen=True):
    """The policy of one request, and its overridden settings.

    `overlap_score_weight` is the older name of `prefill_load_scale`, and takes precedence over it;
    0 also sets `overlap_score_credit` to 0. A field that has no effect, since the policy does not
    use it, is named in the `warnings` of the reply.
    """

    overlap_score_weight: Weight | None = None
    router_temperature: Weight | None = None
    policy: Name | None = None
    prefill_load_scale: Weight | None = None
    overlap_score_credit: Weight | None = None
    shared_cache_multiplier: Weight | None = None
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None


class PromptRequest(Struct, frozen=True, kw_only=True):
    """A prompt and its scope.

    `token_ids`: the prompt's tokens; NATS requests of Dynamo's callers name them `tokens`.
    Instead of tokens a caller may send hashes. `sequence_hashes`: those of the prompt's full
    blocks, under the identity of the ranks in question; they need `isl_tokens`. `isl_tokens`: the
    prompt's length in tokens, needed without tokens. `block_hashes`: local hashes of the same
    blocks, by which caches are then searched, so that `sequence_hashes` only name the blocks in
    bookings.
    """

    tokens_field: ClassVar[str] = "token_ids"
    token_ids: list[TokenId] | None = None
    model_name: Name = "default"
    routing_group: Name = "default"
    lora_name: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: list[BlockHash] | None = None
    sequence_hashes: list[BlockHash] | None = None
    isl_tokens: TokenCount | None = None

    @property
    def scope(self) -> Scope:
        """The scope of the request."""
        return Scope(self.model_name, self.routing_group)


class PotentialLoadsRequest(PromptRequest, frozen=True, kw_only=True):
    """A query for the load of each rank if this prompt were placed there."""

    router_config_override: ConfigOverride | None = None


class Incumbent(Struct, frozen=True):
    """The rank to which another router has sent this request, for comparison with our choice."""

    worker_id: UInt
    dp_rank: DpRank = 0

    @property
    def rank(self) -> Rank:
        """The rank."""
        return Rank(self.worker_id, self.dp_rank)


class RankTarget(Struct, frozen=True):
    """A rank of a worker, or any rank of it."""

    worker_id: UInt
    dp_rank: DpRank | None = None


class RoutingConstraints(Struct, frozen=True):
    """Taints that a worker must have, and taints that it should have, each with its weight.

    Taints with a weight above 0 are preferred, those below 0 avoided.
    """

    required_taints: Annotated[list[Taint], Meta(max_length=256)] = []
    preferred_taints: Annotated[dict[Taint, TaintWeight], Meta(max_length=256)] = {}


class SelectRequest(PromptRequest, frozen=True, kw_only=True):
    """A request to select a rank for a prompt.

    `session_id`: a conversation, which stays on the worker that served it first. `session_is_hint`:
    it was inferred, so its rank is only preferred to ranks that cost nearly the same.
    `session_is_final`: its last request, after which its rank is forgotten. `affinity_target`:
    the worker of the conversation, for callers that know it. `prefill_worker_id`: the worker that
    has computed the prompt, near which it should be decoded. `incumbent`: the rank chosen by
    another router; read in shadow mode only.

    The following fields apply if the request has to wait. `tenant`: tenants share the capacity.
    `fair_share_id`: a user or session, which share what their tenant gets, and never more.
    `policy_class`: a family or class of the policy file. `strict_priority`: the highest goes first;
    callers with a tenant may send 0 alone, unless their token allows more. `priority_jump`: a head
    start in seconds (with `wspt`, a weight). `max_wait_s`: after this time in the queue the request
    is refused.

    `slo_ttft_ms`, `slo_tpot_ms`: objectives in milliseconds, of the time to the first token and of
    the mean time per further output token, in place of those of its policy class. The request is
    placed where they are predicted to be met. `slo_unmet`: if they can be met nowhere, "refuse" it
    with 429 (the default), or "place" it where they are missed least.

    `excluded_worker_ids`: workers that have failed this request, and are not tried again.

    `phase`: the part of the work to be placed. "prefill": the prompt, of which the worker, one of
    role prefill, is to keep nothing, so that its blocks count as no load; "decode": what follows a
    prompt that another has computed, so that only blocks count; "aggregated": all of it. Without
    one, all of it but at workers that decode only. Only the phase "prefill" is placed on workers of
    role prefill.

    `selection_id`: an id of the choice itself, under which `/reservations` can book it. It is then
    the id of that booking, in place of `request_id`. `advisory`: add the load of the chosen rank to
    the reply. `kv_hint`: accepted, without effect.
    """

    selection_id: RequestId | None = None
    request_id: RequestId | None = None
    allowed_worker_ids: list[UInt] | None = None
    excluded_worker_ids: list[UInt] | None = None
    phase: Phase | None = None
    pinned_worker: RankTarget | None = None
    affinity_target: RankTarget | None = None
    routing_constraints: RoutingConstraints | None = None
    session_id: SessionId | None = None
    session_is_hint: bool = False
    session_is_final: bool = False
    prefill_worker_id: UInt | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None
    tenant: Annotated[str, Meta(max_length=256)] | None = None
    fair_share_id: Annotated[str, Meta(max_length=256)] | None = None
    policy_class: Annotated[str, Meta(max_length=256)] | None = None
    strict_priority: Annotated[int, Meta(ge=0, le=U32_MAX)] = 0
    priority_jump: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    max_wait_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_unmet: Unmet | None = None
    explain: bool = False
    advisory: bool = False
    kv_hint: Any = None
    incumbent: Incumbent | None = None


class ReserveRequest(PromptRequest, frozen=True, kw_only=True):
    """A request to book this prompt on a rank that the caller chose.

    `slo_ttft_ms`, `slo_tpot_ms`: see `SelectRequest`; whether they are met is counted.
    """

    worker_id: UInt
    dp_rank: DpRank = 0
    phase: Phase | None = None
    request_id: RequestId | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None


class BookRequest(PromptRequest, frozen=True, kw_only=True):
    """A request to book this prompt on a rank of a worker, or as it was selected.

    `worker_id`: the worker; without it, the selection of this model and group under `selection_id`
    is booked. The id of the booking is `selection_id`, or else `request_id`. `slo_ttft_ms`,
    `slo_tpot_ms`: whether they are met is counted; those of a selection are the selection's.
    """

    worker_id: UInt | None = None
    dp_rank: DpRank = 0
    phase: Phase | None = None
    selection_id: RequestId | None = None
    request_id: RequestId | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None

    def at(self, rank: Rank) -> ReserveRequest:
        """Return the request to book the prompt on this rank."""
        shared = (name for name in ReserveRequest.__struct_fields__ if hasattr(self, name))
        fields = {name: getattr(self, name) for name in shared}
        fields["request_id"] = self.selection_id or self.request_id
        return ReserveRequest(**fields | {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank})


class BusyThresholdRequest(Struct, frozen=True, kw_only=True):
    """Thresholds above which a rank of a model is busy.

    Fields that are present change; null means no threshold.
    """

    model: Name
    active_decode_blocks_threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    active_prefill_tokens_threshold: TokenCount | UnsetType | None = UNSET
    active_prefill_tokens_threshold_frac: (
        Annotated[float, Meta(ge=0, le=1e9)] | UnsetType | None
    ) = UNSET


class ReplicaPeerRequest(Struct, frozen=True):
    """Another router's socket, as callers of Dynamo's service name it."""

    endpoint: Annotated[str, Meta(min_length=1, max_length=1024)]


class CachedTokens(Struct, frozen=True):
    """The cached tokens in OpenAI's usage."""

    cached_tokens: TokenCount = 0


class Usage(Struct, frozen=True):
    """An engine's usage report: the length of the prompt, its cached part, and the output.

    `cached_tokens`: the cached part, in our format. `prompt_tokens_details`: the cached part, in
    OpenAI's format. `completion_tokens`: generated tokens, by which the time per output token of
    requests with an objective is judged once they are freed.
    """

    prompt_tokens: TokenCount
    cached_tokens: TokenCount | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens: TokenCount | None = None

    @property
    def is_cached_reported(self) -> bool:
        """True if the report contains the number of cached tokens."""
        return self.cached_tokens is not None or self.prompt_tokens_details is not None

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        if self.cached_tokens is not None:
            return self.cached_tokens
        return 0 if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class PrefillCompleteRequest(Struct, frozen=True):
    """A report that a booked prompt is computed. `usage`: its engine's usage report."""

    usage: Usage | None = None


class FreeRequest(Struct, frozen=True):
    """A report that a booked request ended.

    `usage`: its engine's usage report for the prompt, which streams contain at their end.
    """

    usage: Usage | None = None


class OutputBlockRequest(Struct, frozen=True):
    """A report that the output of a request grew by a block.

    `decay_fraction`: the new weight, 0 to 1, of blocks that only this request holds.
    """

    decay_fraction: float | None = None

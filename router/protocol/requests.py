"""What callers ask, over HTTP; over NATS the same, as `commands.py` tags it. Unknown fields are
ignored.
"""

from typing import Annotated, Any, ClassVar, TypeAlias

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
    """The policy of one request, and settings of it. `overlap_score_weight` is the older name of
    `prefill_load_scale`, which it precedes; 0 also makes `overlap_score_credit` 0.
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
    """A prompt, and whose it is. `tokens_field` is what callers know `token_ids` by.

    Instead of tokens a caller may know the `sequence_hashes` of the prompt's full blocks, under the
    identity of the ranks in question, and its length, `isl_tokens`. With `block_hashes`, the local
    ones, caches are searched by those, and `sequence_hashes` only name the blocks in bookings.
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
        """The scope asked about."""
        return Scope(self.model_name, self.routing_group)


class Incumbent(Struct, frozen=True):
    """Where another router has sent this request, whose choices ours are compared with."""

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
    """Taints that a worker must have, and those that it should have, each with its weight: above 0
    it is preferred, below 0 avoided.
    """

    required_taints: Annotated[list[Taint], Meta(max_length=256)] = []
    preferred_taints: Annotated[dict[Taint, TaintWeight], Meta(max_length=256)] = {}


class SelectRequest(PromptRequest, frozen=True, kw_only=True):
    """Which rank should serve this prompt?

    `session_id` names a conversation that stays where it was served first; `affinity_target` is
    where that is, for callers that know. `prefill_worker_id`: who has computed the prompt, near
    whom it should be decoded. `incumbent` is read in shadow mode alone.

    Where it has to wait: `tenant`s share what there is; `policy_class` names a family or class of
    the policy file; the highest `strict_priority` goes first; `priority_jump` is a head start in
    seconds (with `wspt`, a weight); after `max_wait_s` it is refused.

    `excluded_worker_ids`: who has failed this request, and is not to be tried again.

    `phase`: which part of the work is to be placed. "prefill": the prompt, of which the worker, one
    of role prefill, is to keep nothing, so that its blocks count as no load; "decode": what follows
    a prompt that another has computed, so that only blocks count; "aggregated": all of it. Without
    one, all of it but at workers that decode only. No phase but its own is placed at role prefill.

    `selection_id` names the choice itself: `/reservations` books what was selected under it. It is
    then the id of that booking, whatever `request_id` says. `advisory` asks for the load of the
    chosen rank. `kv_hint` is accepted, and nothing depends on it.
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
    prefill_worker_id: UInt | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None
    tenant: Annotated[str, Meta(max_length=256)] | None = None
    policy_class: Annotated[str, Meta(max_length=256)] | None = None
    strict_priority: Annotated[int, Meta(ge=0, le=U32_MAX)] = 0
    priority_jump: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    max_wait_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    explain: bool = False
    advisory: bool = False
    kv_hint: Any = None
    incumbent: Incumbent | None = None


class ReserveRequest(PromptRequest, frozen=True, kw_only=True):
    """Book this prompt on a rank that the caller chose."""

    worker_id: UInt
    dp_rank: DpRank = 0
    phase: Phase | None = None
    request_id: RequestId | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None


class BookRequest(PromptRequest, frozen=True, kw_only=True):
    """Book this prompt on a rank of `worker_id`; without one, what was selected for this model and
    group under `selection_id`. That, or else `request_id`, is the id of the booking.
    """

    worker_id: UInt | None = None
    dp_rank: DpRank = 0
    phase: Phase | None = None
    selection_id: RequestId | None = None
    request_id: RequestId | None = None
    expected_output_tokens: TokenCount | None = None
    router_config_override: ConfigOverride | None = None

    def at(self, rank: Rank) -> ReserveRequest:
        """The same, of a rank."""
        shared = (name for name in ReserveRequest.__struct_fields__ if hasattr(self, name))
        said = {name: getattr(self, name) for name in shared}
        said["request_id"] = self.selection_id or self.request_id
        return ReserveRequest(**said | {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank})


class BusyThresholdRequest(Struct, frozen=True, kw_only=True):
    """Above what a rank of a model is busy: what is named changes, null means no threshold."""

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
    """Where OpenAI's usage says how much of a prompt was cached."""

    cached_tokens: TokenCount = 0


class Usage(Struct, frozen=True):
    """What an engine says of a prompt: how long it was, and how much of it was cached; in its own
    words or in OpenAI's (`prompt_tokens_details`).
    """

    prompt_tokens: TokenCount
    cached_tokens: TokenCount | None = None
    prompt_tokens_details: CachedTokens | None = None

    @property
    def is_cached_told(self) -> bool:
        """Whether it says how many tokens were not computed."""
        return self.cached_tokens is not None or self.prompt_tokens_details is not None

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        if self.cached_tokens is not None:
            return self.cached_tokens
        return 0 if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class PrefillCompleteRequest(Struct, frozen=True):
    """A booked prompt is computed; `usage`: what its engine said of it."""

    usage: Usage | None = None


class FreeRequest(Struct, frozen=True):
    """A booked request ended; `usage`: what its engine said of its prompt. Streams say it last."""

    usage: Usage | None = None


class OutputBlockRequest(Struct, frozen=True):
    """The request grew by a block; `decay_fraction` (0 to 1) weighs blocks that only it holds."""

    decay_fraction: float | None = None

"""Queries of the standalone index, and the instances and peers registered with it.

HTTP bodies are those of Dynamo's standalone indexer (1.1). `kv.{ns}.indexer.query` accepts its
runtime query, JSON with one key that names the query:

    {"FindMatchesTokens": {"tokens": [u32, …], …}}      a prompt
    {"FindMatchesHashed": {"block_hashes": [64 bit, …], …}}    the local hashes of its blocks
    "DumpTree"   or   {"DumpTree": {…}}                 everything held

each with optional `model_name`, `routing_group`, `cache_salt`, and with tokens `lora_name` and
`block_mm_infos`. The reply is one of

    {"Matches": {"scores": [[{"worker_id": 1, "dp_rank": 0}, blocks], …], "frequencies": [uses, …]}}
    {"TreeDump": [event as in GET /dump, …]}
    {"Error": "which field, why, what is allowed"}
"""

from typing import Annotated, ClassVar, TypeAlias
from urllib.parse import urlsplit

from msgspec import UNSET, Meta, Struct, UnsetType

from router.protocol.dumps import DumpEvent
from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import U64_MAX, DpRank, Endpoint, Name, Scope, TokenId, UInt

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

SignedHash: TypeAlias = Annotated[int, Meta(ge=I64_MIN, le=I64_MAX)]


def agreed_group(routing_group: str | None, tenant_id: str | None) -> str | None:
    """Return the routing group under either of its names. Raises ValueError if they differ."""
    if None not in (routing_group, tenant_id) and routing_group != tenant_id:
        raise ValueError("Expected one of `routing_group` and `tenant_id`, got two that differ")
    return tenant_id if routing_group is None else routing_group


class ScopeFields(Struct, frozen=True, kw_only=True):
    """The scope of a query. `tenant_id` is the older name of `routing_group`."""

    model_name: Name = "default"
    routing_group: Name | None = None
    tenant_id: Name | None = None

    def __post_init__(self) -> None:
        agreed_group(self.routing_group, self.tenant_id)

    @property
    def group(self) -> str | None:
        """The routing group, under either of its names."""
        return agreed_group(self.routing_group, self.tenant_id)

    @property
    def scope(self) -> Scope:
        """The scope of the query."""
        return Scope(self.model_name, self.group or "default")


class _PromptFields(ScopeFields, frozen=True, kw_only=True):
    lora_name: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None

    def _prompt(self, token_ids: list[TokenId]) -> PromptRequest:
        return PromptRequest(
            token_ids=token_ids,
            model_name=self.scope.model_name,
            routing_group=self.scope.routing_group,
            lora_name=self.lora_name,
            cache_salt=self.cache_salt,
            block_mm_infos=self.block_mm_infos,
        )


class QueryRequest(_PromptFields, frozen=True, kw_only=True):
    """HTTP: a query for the cached prefix of a prompt on every rank."""

    token_ids: list[TokenId]

    @property
    def prompt(self) -> PromptRequest:
        """The prompt."""
        return self._prompt(self.token_ids)


class HashQueryRequest(ScopeFields, frozen=True, kw_only=True):
    """HTTP: the same query, by the local hashes of the prompt's blocks, as signed integers."""

    block_hashes: list[SignedHash]
    cache_salt: str | None = None


class InstanceOverlap(Struct, frozen=True):
    """The cached prefix of an instance in tokens, cumulative over tiers.

    In each tier it is that of the instance's best rank. `longest_matched`: over all tiers, the
    remote one included. `dp`: of each rank, on the device.
    """

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class QueryReply(Struct, frozen=True):
    """HTTP: instances that hold at least the first block.

    `scores`: of each rank, in any tier.
    """

    scores: dict[str, dict[str, int]]
    frequencies: list[int]
    instances: dict[str, InstanceOverlap]


class TokensLookup(_PromptFields, frozen=True, kw_only=True):
    """Bus: a query for the cached prefix of a prompt on every rank."""

    name: ClassVar[str] = "FindMatchesTokens"
    tokens: list[TokenId]

    @property
    def prompt(self) -> PromptRequest:
        """The prompt."""
        return self._prompt(self.tokens)


class HashedLookup(ScopeFields, frozen=True, kw_only=True):
    """Bus: the same query, by the local hashes of the prompt's blocks, signed or unsigned."""

    name: ClassVar[str] = "FindMatchesHashed"
    block_hashes: list[Annotated[int, Meta(ge=I64_MIN)]]
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.block_hashes, default=0) > U64_MAX:
            raise ValueError(f"Expected `int` <= {U64_MAX} in `block_hashes`, got a larger one")


class TreeLookup(ScopeFields, frozen=True, kw_only=True):
    """Bus: a query for everything held."""

    name: ClassVar[str] = "DumpTree"


IndexQuestion: TypeAlias = TokensLookup | HashedLookup | TreeLookup

QUESTIONS = ", ".join(f"`{kind.name}`" for kind in (TokensLookup, HashedLookup, TreeLookup))


class IndexQuestions(Struct, frozen=True, rename="pascal"):
    """Bus: exactly one query, under its name."""

    find_matches_tokens: TokensLookup | UnsetType = UNSET
    find_matches_hashed: HashedLookup | UnsetType = UNSET
    dump_tree: TreeLookup | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if len(self._questions) != 1:
            raise ValueError(f"Expected one of {QUESTIONS}, got {len(self._questions)} of them")

    @property
    def question(self) -> IndexQuestion:
        """The query."""
        return self._questions[0]

    @property
    def _questions(self) -> list[IndexQuestion]:
        tree = TreeLookup() if self.dump_tree is None else self.dump_tree
        fields = (self.find_matches_tokens, self.find_matches_hashed, tree)
        return [field for field in fields if not isinstance(field, UnsetType)]


IndexMessage: TypeAlias = str | IndexQuestions
"""A query message. A bare string is the name of a query without fields."""


class WorkerWithRank(Struct, frozen=True):
    """One rank, in the spelling of the wire format."""

    worker_id: int
    dp_rank: int


class Matches(Struct, frozen=True):
    """Bus: ranks that hold at least the first block, each with its longest prefix in any tier."""

    scores: list[tuple[WorkerWithRank, int]]
    frequencies: list[int]


class MatchesReply(Struct, frozen=True, rename="pascal"):
    """Bus: the reply to both prompt queries."""

    matches: Matches


class TreeDumpReply(Struct, frozen=True, rename="pascal"):
    """Bus: the reply to `DumpTree`."""

    tree_dump: list[DumpEvent]


class ErrorReply(Struct, frozen=True, rename="pascal"):
    """Bus: the reason why a query failed."""

    error: str


class _InstanceFields(ScopeFields, frozen=True, kw_only=True):
    instance_id: UInt
    model_name: Name


class RegisterRequest(_InstanceFields, frozen=True, kw_only=True):
    """A request to follow the events of this rank from now on.

    `endpoint`: either `nats` or `nats://…`.
    """

    endpoint: Endpoint
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    dp_rank: DpRank = 0
    replay_endpoint: str | None = None
    additional_salt: str | None = None


class UnregisterRequest(_InstanceFields, frozen=True, kw_only=True):
    """A request to forget this rank of an instance, or the whole instance without `dp_rank`."""

    dp_rank: DpRank | None = None


class PeerRequest(Struct, frozen=True):
    """Another indexer."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)]


def is_http_url(url: str) -> bool:
    """Return whether a URL is a valid HTTP address of a peer."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class ListenerView(Struct, frozen=True, omit_defaults=True):
    """The source of one rank's events, and the state of its index.

    `active`: reliable; `pending`: nothing was read yet; `degraded`: see `reason`.
    """

    endpoint: str
    status: str
    reason: str | None = None


class InstanceView(Struct, frozen=True):
    """One instance, with the worst status of its ranks."""

    instance_id: int
    source: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str]
    listeners: dict[str, ListenerView]

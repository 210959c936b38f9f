"""What the index alone is asked and answers: over HTTP in tokens, on the bus in blocks.

HTTP bodies are those of Dynamo's standalone indexer (1.1). On `kv.{ns}.indexer.query` its runtime
query, as JSON with one key that says what is asked:

    {"FindMatchesTokens": {"tokens": [u32, …], …}}      a prompt
    {"FindMatchesHashed": {"block_hashes": [64 bit, …], …}}    the local hashes of its blocks
    "DumpTree"   or   {"DumpTree": {…}}                 everything held

each with optional `model_name`, `routing_group`, `cache_salt`, and with tokens `lora_name` and
`block_mm_infos`; and one of the answers

    {"Matches": {"scores": [[{"worker_id": 1, "dp_rank": 0}, blocks], …], "frequencies": [uses, …]}}
    {"TreeDump": [event as in GET /dump, …]}
    {"Error": "which field, why, what is allowed"}
"""

from typing import Annotated, ClassVar, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from router.protocol.dumps import DumpEvent
from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import U64_MAX, Name, Scope, TokenId

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

SignedHash: TypeAlias = Annotated[int, Meta(ge=I64_MIN, le=I64_MAX)]


def agreed_group(routing_group: str | None, tenant_id: str | None) -> str | None:
    """A routing group, under whichever name it came. Raises ValueError for two that differ."""
    if None not in (routing_group, tenant_id) and routing_group != tenant_id:
        raise ValueError("Expected one of `routing_group` and `tenant_id`, got two that differ")
    return tenant_id if routing_group is None else routing_group


class ScopeFields(Struct, frozen=True, kw_only=True):
    """Whose index is meant. `tenant_id` is the older name of `routing_group`."""

    model_name: Name = "default"
    routing_group: Name | None = None
    tenant_id: Name | None = None

    def __post_init__(self) -> None:
        agreed_group(self.routing_group, self.tenant_id)

    @property
    def group(self) -> str | None:
        """The routing group, under whichever name it came."""
        return agreed_group(self.routing_group, self.tenant_id)

    @property
    def scope(self) -> Scope:
        """The scope meant."""
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
    """HTTP: who holds how much of this prompt?"""

    token_ids: list[TokenId]

    @property
    def prompt(self) -> PromptRequest:
        """The prompt asked about."""
        return self._prompt(self.token_ids)


class HashQueryRequest(ScopeFields, frozen=True, kw_only=True):
    """HTTP: the same, by the local hashes of the prompt's blocks, as signed integers."""

    block_hashes: list[SignedHash]
    cache_salt: str | None = None


class InstanceOverlap(Struct, frozen=True):
    """Cached prefix of an instance in tokens, its best rank's in each tier, cumulative over tiers.

    `longest_matched` is over all tiers, the remote one included; `dp`: of each rank, on the device.
    """

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class QueryReply(Struct, frozen=True):
    """HTTP: instances that hold at least the first block; `scores`: of each rank, in any tier."""

    scores: dict[str, dict[str, int]]
    frequencies: list[int]
    instances: dict[str, InstanceOverlap]


class TokensLookup(_PromptFields, frozen=True, kw_only=True):
    """Bus: who holds how much of this prompt?"""

    name: ClassVar[str] = "FindMatchesTokens"
    tokens: list[TokenId]

    @property
    def prompt(self) -> PromptRequest:
        """The prompt asked about."""
        return self._prompt(self.tokens)


class HashedLookup(ScopeFields, frozen=True, kw_only=True):
    """Bus: the same, by the local hashes of the prompt's blocks, signed or unsigned."""

    name: ClassVar[str] = "FindMatchesHashed"
    block_hashes: list[Annotated[int, Meta(ge=I64_MIN)]]
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.block_hashes, default=0) > U64_MAX:
            raise ValueError(f"Expected `int` <= {U64_MAX} in `block_hashes`, got a larger one")


class TreeLookup(ScopeFields, frozen=True, kw_only=True):
    """Bus: everything held."""

    name: ClassVar[str] = "DumpTree"


IndexQuestion: TypeAlias = TokensLookup | HashedLookup | TreeLookup

QUESTIONS = ", ".join(f"`{kind.name}`" for kind in (TokensLookup, HashedLookup, TreeLookup))


class IndexQuestions(Struct, frozen=True, rename="pascal"):
    """Bus: exactly one question, under its name."""

    find_matches_tokens: TokensLookup | UnsetType = UNSET
    find_matches_hashed: HashedLookup | UnsetType = UNSET
    dump_tree: TreeLookup | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if len(self._asked) != 1:
            raise ValueError(f"Expected one of {QUESTIONS}, got {len(self._asked)} of them")

    @property
    def question(self) -> IndexQuestion:
        """What is asked."""
        return self._asked[0]

    @property
    def _asked(self) -> list[IndexQuestion]:
        tree = TreeLookup() if self.dump_tree is None else self.dump_tree
        fields = (self.find_matches_tokens, self.find_matches_hashed, tree)
        return [field for field in fields if not isinstance(field, UnsetType)]


IndexMessage: TypeAlias = str | IndexQuestions
"""A bare string is the name of a question without fields."""


class WorkerWithRank(Struct, frozen=True):
    """One rank, as the peer spells it."""

    worker_id: int
    dp_rank: int


class Matches(Struct, frozen=True):
    """Bus: ranks that hold at least the first block, each with its longest prefix in any tier."""

    scores: list[tuple[WorkerWithRank, int]]
    frequencies: list[int]


class MatchesReply(Struct, frozen=True, rename="pascal"):
    """Bus: answer to both lookups."""

    matches: Matches


class TreeDumpReply(Struct, frozen=True, rename="pascal"):
    """Bus: answer to `DumpTree`."""

    tree_dump: list[DumpEvent]


class ErrorReply(Struct, frozen=True, rename="pascal"):
    """Bus: why there is no answer."""

    error: str

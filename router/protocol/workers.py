"""Workers that callers register over HTTP, the endpoints of their engines, and views of workers.

The bodies are those of Dynamo's selection service; `replay_endpoints`, `topic`, `engine`,
`report_mode`, `caches_prefixes`, `load_endpoints` and `block_addresses` are ours. Missing fields
make a worker incomplete, not invalid.
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, structs

from router.errors import InvalidFieldError
from router.protocol.catalogue import Enforcement, Lifecycle, TransferWeight, WorkerLabels
from router.protocol.dumps import TierName
from router.protocol.hybrid import NO_SETTINGS, ClassKind, HybridSettings
from router.protocol.index_service import agreed_group
from router.protocol.loads import LoadGauges
from router.protocol.replies import Trust
from router.protocol.values import U64_MAX, DpRank, Name, Role, Scope, Taint, UInt

Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
EngineKind: TypeAlias = Literal["vllm", "sglang", "trtllm"]
ReportMode: TypeAlias = Literal["new", "full"]


class WorkerFields(Struct, frozen=True, kw_only=True):
    """The mutable properties of a worker; None: not given.

    Maps are by `dp_rank`. `kv_events_endpoint`: of a worker with one rank. `replay_endpoint`: of a
    worker with one rank. `block_addresses`: see `WorkerAnnouncement`.
    `topic`: the prefix under which the engine publishes. `engine` "sglang"
    clears all tiers at once. `report_mode` "full": the engine may report stored blocks again.
    `hybrid`: of a hybrid model, what no event contains.
    `caches_prefixes` false: it reuses no blocks, and none are estimated. The last nine are its
    labels, which requests may select by. `stable_routing_id` is kept and shown, and has no effect.
    """

    endpoint: Text | None = None
    kv_events_endpoint: Text | None = None
    kv_events_endpoints: dict[DpRank, Text] | None = None
    replay_endpoint: Text | None = None
    replay_endpoints: dict[DpRank, Text] | None = None
    load_endpoints: dict[DpRank, Text] | None = None
    block_addresses: dict[DpRank, list[Text]] | None = None
    topic: Text | None = None
    engine: EngineKind | None = None
    report_mode: ReportMode | None = None
    hybrid: HybridSettings | None = None
    caches_prefixes: bool | None = None
    block_size: Annotated[int, Meta(ge=0, le=65_536)] | None = None
    is_eagle: bool | None = None
    data_parallel_start_rank: DpRank | None = None
    data_parallel_size: Annotated[int, Meta(ge=0, le=1024)] | None = None
    total_kv_blocks: UInt | None = None
    max_num_batched_tokens: UInt | None = None
    role: Role | None = None
    stable_routing_id: Text | None = None
    taints: list[Taint] | None = None
    topology_domains: dict[Taint, Taint] | None = None
    kv_transfer_domain: Taint | None = None
    kv_transfer_enforcement: Enforcement | None = None
    kv_transfer_preferred_weight: TransferWeight | None = None
    lora_names: list[Name] | None = None
    max_gpu_lora_count: Annotated[int, Meta(ge=1)] | None = None
    model_aliases: list[Name] | None = None
    max_model_len: UInt | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The given fields, by name."""
        values = {name: getattr(self, name) for name in WorkerFields.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}


def _check_names(worker_id: int | None, routing_group: str | None, tenant_id: str | None) -> None:
    if worker_id is not None and worker_id > U64_MAX:
        raise ValueError(f"Expected `int` <= {U64_MAX}, got {worker_id}")
    agreed_group(routing_group, tenant_id)


class WorkerRegistration(WorkerFields, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, as it is registered and kept. `tenant_id` is the older name of `routing_group`."""

    worker_id: UInt
    model_name: Name = "default"
    routing_group: Name | None = None
    tenant_id: Name | None = None

    def __post_init__(self) -> None:
        _check_names(self.worker_id, self.routing_group, self.tenant_id)

    @property
    def scope(self) -> Scope:
        """The scope it serves."""
        group = agreed_group(self.routing_group, self.tenant_id)
        return Scope(self.model_name, group or "default")

    @property
    def dp_ranks(self) -> range:
        """Its data-parallel ranks, in order; one by default."""
        start = self.data_parallel_start_rank or 0
        size = 1 if self.data_parallel_size is None else self.data_parallel_size
        return range(start, start + size)

    @property
    def labels(self) -> WorkerLabels:
        """The properties that requests may select by."""
        names = WorkerLabels.__struct_fields__
        return WorkerLabels(**{name: each for name, each in self.given.items() if name in names})

    def patched(self, patch: WorkerFields) -> "WorkerRegistration":
        """Return the registration with the patch's fields."""
        return structs.replace(self, **patch.given)


class WorkerRequest(WorkerFields, frozen=True, kw_only=True):
    """A worker to register. With an endpoint and nothing else, its engine is asked for the rest.

    `tenant_id` is the older name of `routing_group`.
    """

    worker_id: UInt | None = None
    model_name: Name = "default"
    routing_group: Name | None = None
    tenant_id: Name | None = None

    @property
    def url(self) -> str | None:
        """The URL of the engine to ask; None if the request registers the worker itself."""
        names = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        return self.endpoint if names == {"endpoint", "model_name"} else None

    @property
    def registration(self) -> WorkerRegistration:
        """The registration. Raises InvalidFieldError without a worker id."""
        if self.worker_id is None:
            allowed = "an integer; or an endpoint and nothing else, whose engine is then asked"
            raise InvalidFieldError("worker_id", "missing", allowed, status=422)
        names = ("worker_id", "model_name", "routing_group", "tenant_id")
        return WorkerRegistration(**{name: getattr(self, name) for name in names}, **self.given)

    def __post_init__(self) -> None:
        _check_names(self.worker_id, self.routing_group, self.tenant_id)


class WorkerPatch(WorkerFields, frozen=True, kw_only=True):
    """Changes to a worker: missing and null fields stay.

    `lifecycle`: cordon it, drain it, or let it serve again. Another model or group needs another
    registration.
    """

    lifecycle: Lifecycle | None = None


class EngineSource(Struct, frozen=True):
    """The endpoints and the format of one rank's engine, which the router itself follows.

    `has_full_only`: its model is hybrid, and its events are of full attention alone.
    """

    events: str
    replay: str | None = None
    topic: str = ""
    load: str | None = None
    engine: EngineKind = "vllm"
    report_mode: ReportMode = "new"
    hybrid: HybridSettings = NO_SETTINGS
    has_full_only: bool = False


class TierView(Struct, frozen=True):
    """The blocks of a rank in one tier.

    `digest`: XOR of a mix of the hashes, in hexadecimal, to compare with the agent's. `holes`:
    blocks held here or in a faster tier without their parents, by the rank's last report.
    """

    blocks: int
    digest: str
    holes: int


class EngineView(Struct, frozen=True):
    """The state of a direct connection to the engine of a rank.

    `condition`: connecting, replaying, following, or blind (connected, but nothing is replayed);
    `problem`: the last fault; `silent_s`: time since its last message, null if there was none.
    """

    events: str
    replay: str | None
    condition: str
    problem: str | None
    silent_s: float | None


class ClassView(Struct, frozen=True):
    """Layers of one kind and shape of a hybrid model, and the blocks that its rank holds for them.

    `span_tokens`: of a window or a chunk, else 0; `is_eagle`: the last block of a hit is dropped.
    """

    kind: ClassKind
    block_tokens: int
    span_tokens: int
    is_eagle: bool
    blocks: int


class LayoutView(Struct, frozen=True):
    """The layers of a hybrid model, as its engine's events describe them.

    Prompts are resumed at multiples of `alignment_tokens`. `full_block_tokens`: the block size of
    full attention, 0 without any; `classes`: of the other layers. `problem`: why it is not exact
    where prompts are resumed; empty if it is.
    """

    alignment_tokens: int
    full_block_tokens: int
    is_full_eagle: bool
    problem: str
    classes: list[ClassView]


class RankView(Struct, frozen=True):
    """One rank of a worker.

    `is_busy`: it was above a threshold at the last decision; `engine`: null if its events come over
    the bus; `layout`: null unless its model is hybrid.
    """

    dp_rank: int
    trust: Trust
    held_blocks: int
    tiers: dict[TierName, TierView]
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    is_busy: bool
    reported: LoadGauges | None
    engine: EngineView | None = None
    layout: LayoutView | None = None


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker, as announced or registered, with its current state.

    `attachment`: what is known of an engine that was attached by its URL, in one sentence.

    Null: not reported or not known yet. Fields of registered workers only come last, before the
    labels that requests may require.
    """

    worker_id: int
    name: str
    model_name: str
    routing_group: str
    lifecycle: str
    endpoint: str | None
    block_size: int | None
    is_eagle: bool | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    role: str
    incarnation: int | None
    last_heard_s: float | None
    not_schedulable_reasons: list[str]
    ranks: list[RankView]
    attachment: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[int, str] = {}
    replay_endpoint: str | None = None
    replay_endpoints: dict[int, str] = {}
    load_endpoints: dict[int, str] = {}
    block_addresses: dict[int, list[str]] = {}
    topic: str | None = None
    engine: str | None = None
    report_mode: str | None = None
    caches_prefixes: bool | None = None
    stable_routing_id: str | None = None
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    lora_names: list[str] | None = None
    max_gpu_lora_count: int | None = None
    model_aliases: list[str] = []
    max_model_len: int | None = None
    hybrid: HybridSettings | None = None


class BlockHolder(Struct, frozen=True):
    """A rank that holds the block; `fastest_tier`: the fastest of the tiers that hold it there."""

    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    fastest_tier: TierName
    trust: Trust


class BlockHolders(Struct, frozen=True):
    """All announced ranks that hold a block, of any model and routing group."""

    sequence_hash: int
    holders: list[BlockHolder]

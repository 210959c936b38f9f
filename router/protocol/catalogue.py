"""Who exists: key-value bucket `kv-{ns}-workers`, JSON so that the NATS tools can read it.

Keys: `worker.{worker_id}` and `router.{router_id}`, each written by the process it names and
renewed while it lives; `order.{worker_id}`, written by operators through a router, kept until
revoked.
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, json

from router.protocol.codec import decode
from router.protocol.values import (
    DpRank,
    Endpoint,
    Identity,
    Name,
    Rank,
    Role,
    Scope,
    Taint,
    UInt,
    ranks_of,
)

Enforcement: TypeAlias = Literal["required", "preferred"]
TransferWeight: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class WorkerLabels(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests may ask for in a worker.

    They may require or prefer `taints`, and its place in each of the `topology_domains`.
    `kv_transfer_domain`: within it a prompt computed here must be decoded, or should be, where that
    is "preferred", with this weight (1). `lora_names`: the adapters it can serve; None: any.
    `max_gpu_lora_count`: how many it keeps loaded; None: one.
    """

    taints: list[Taint] = []
    topology_domains: dict[Taint, Taint] = {}
    kv_transfer_domain: Taint | None = None
    kv_transfer_enforcement: Enforcement | None = None
    kv_transfer_preferred_weight: TransferWeight | None = None
    lora_names: list[Name] | None = None
    max_gpu_lora_count: Annotated[int, Meta(ge=1)] | None = None


class WorkerAnnouncement(Struct, frozen=True, kw_only=True):
    """A worker, as its agent announces it.

    `agent_is_engine`: the agent runs the engine itself, so its silence is the engine's;
    otherwise it stands beside an engine that may well outlive it. `reports_load`: silence says
    something at all. `total_kv_blocks`, of each rank, and `max_num_batched_tokens`: 0 where nobody
    knows. `block_addresses`: where other workers ask for the blocks of a rank, `tcp://host:port` or
    `unix:///path`; ranks that are not there keep theirs to themselves.
    """

    worker_id: UInt
    name: Name
    model_name: Name = "default"
    routing_group: Name = "default"
    endpoint: Endpoint
    identity: Identity
    total_kv_blocks: UInt
    max_num_batched_tokens: UInt
    data_parallel_start_rank: DpRank = 0
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    role: Role = "aggregated"
    incarnation: UInt
    agent_is_engine: bool = True
    labels: WorkerLabels = WorkerLabels()
    block_addresses: dict[DpRank, list[Endpoint]] = {}
    reports_load: ClassVar[bool] = True

    @property
    def scope(self) -> Scope:
        """The scope this worker serves."""
        return Scope(self.model_name, self.routing_group)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of this worker, in order."""
        start_rank, size = self.data_parallel_start_rank, self.data_parallel_size
        return ranks_of(self.worker_id, start_rank, size)

    @property
    def rank_count(self) -> int:
        """How many they are. O(1)."""
        return self.data_parallel_size

    def source(self, _: Rank) -> Struct | None:
        """Where a rank's events come from, if not from the bus."""
        return None


class RouterAnnouncement(Struct, frozen=True, kw_only=True):
    """A router, as it announces itself, so that routers find each other."""

    router_id: UInt
    name: Name
    endpoint: Endpoint
    incarnation: UInt


Lifecycle: TypeAlias = Literal["schedulable", "cordoned", "draining"]


class WorkerOrder(Struct, frozen=True):
    """What an operator wants of a worker; it outlives routers and workers."""

    lifecycle: Lifecycle


_worker_decoder = json.Decoder(WorkerAnnouncement)
_router_decoder = json.Decoder(RouterAnnouncement)
_order_decoder = json.Decoder(WorkerOrder)


def worker_key(worker_id: int | Literal["*"]) -> str:
    """Key of a worker's announcement, or of every worker's."""
    return f"worker.{worker_id}"


def router_key(router_id: int) -> str:
    """Key of a router's announcement."""
    return f"router.{router_id}"


def order_key(worker_id: int) -> str:
    """Key of an operator's order about a worker."""
    return f"order.{worker_id}"


def encode_entry(entry: WorkerAnnouncement | RouterAnnouncement | WorkerOrder) -> bytes:
    """The bytes of an entry."""
    return json.encode(entry)


def decode_worker(payload: bytes) -> WorkerAnnouncement:
    """A worker's announcement. Raises WireError for foreign bytes."""
    return decode(_worker_decoder.decode, payload)


def decode_router(payload: bytes) -> RouterAnnouncement:
    """A router's announcement. Raises WireError for foreign bytes."""
    return decode(_router_decoder.decode, payload)


def decode_order(payload: bytes) -> WorkerOrder:
    """An operator's order. Raises WireError for foreign bytes."""
    return decode(_order_decoder.decode, payload)

"""The catalogue of workers and routers: key-value bucket `kv-{ns}-workers`.

Entries are JSON, so that NATS tools can read them. Keys: `worker.{worker_id}` and
`router.{router_id}`, each written by the process it names and renewed while it lives;
`order.{worker_id}`, written by operators through a router, kept until revoked.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, json

from router.errors import InvalidFieldError
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
    decode,
    ranks_of,
)

Enforcement: TypeAlias = Literal["required", "preferred"]
TransferWeight: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class WorkerLabels(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a worker that requests may select by.

    `taints`: labels that requests may require or prefer. `topology_domains`: the worker's location
    in each domain, which requests may require or prefer. `kv_transfer_domain`: the domain in which
    a prompt computed here must be decoded, or should be if `kv_transfer_enforcement` is
    "preferred", with the weight `kv_transfer_preferred_weight` (default 1). `lora_names`: the
    adapters it can serve; None: any. `max_gpu_lora_count`: how many adapters it keeps loaded; None:
    one. `model_aliases`: further names of its model. `max_model_len`: the limit of prompt and
    response together, in tokens; None: unknown.
    """

    taints: list[Taint] = []
    topology_domains: dict[Taint, Taint] = {}
    kv_transfer_domain: Taint | None = None
    kv_transfer_enforcement: Enforcement | None = None
    kv_transfer_preferred_weight: TransferWeight | None = None
    lora_names: list[Name] | None = None
    max_gpu_lora_count: Annotated[int, Meta(ge=1)] | None = None
    model_aliases: list[Name] = []
    max_model_len: UInt | None = None


class WorkerAnnouncement(Struct, frozen=True, kw_only=True):
    """A worker, as its agent announces it.

    `agent_is_engine`: the agent runs inside the engine, so its silence is the engine's; otherwise
    it runs beside an engine that may outlive it. `reports_load`: load reports are expected, so
    missing ones mean that the worker failed. `total_kv_blocks`: of each rank; 0 if unknown.
    `max_num_batched_tokens`: 0 if unknown. `block_addresses`: by rank, where other workers request
    its blocks: `tcp://host:port` or `unix:///path` of our agents and connector,
    `vllm-p2p://host:port` of vLLM's own P2P tier; ranks without an entry do not share blocks.
    `blocksets`: by rank, its exported pools, in the format of its kind of agent; for workers only.
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
    blocksets: dict[DpRank, dict[str, Any]] = {}
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
        """The number of its ranks. O(1)."""
        return self.data_parallel_size

    @property
    def has_events(self) -> bool:
        """True if its ranks have events, from their engines or from the bus."""
        return True

    @property
    def caches_prefixes(self) -> bool:
        """True if its engine reuses the blocks of earlier prompts."""
        return True

    def source(self, _: Rank) -> Struct | None:
        """Return the source of a rank's events, or None if they come from the bus."""
        return None


VLLM_P2P = "vllm-p2p://"
_P2P_ADDRESS = re.compile(r"vllm-p2p://(?P<host>[^\s/:*\[\]]+):(?P<port>[1-9]\d{0,4})", re.ASCII)
_OURS = re.compile(r"tcp://\S+|unix:///\S+")
_MAX_PORT = 65_535


def vllm_p2p_address(address: str) -> tuple[str, int] | None:
    """Return host and port of the side channel of vLLM's P2P tier; None for other addresses.

    vLLM knows a peer by exactly this host and port, and has no form for IPv6.
    """
    found = _P2P_ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > _MAX_PORT:
        return None
    return found["host"], int(found["port"])


def vllm_p2p_endpoint(place: str, dp_rank: int, field: str) -> str:
    """Return the address of a rank's side channel, of `host:port` of the first rank.

    vLLM adds the data-parallel rank to the port. Raises InvalidFieldError.
    """
    found = vllm_p2p_address(f"{VLLM_P2P}{place}")
    allowed = "host:port as the engine has them, with a name or an IPv4 address of its host"
    if found is None:
        raise InvalidFieldError(field, f"{place!r} is no place of a P2P tier", allowed, status=422)
    host, port = found
    if port + dp_rank > _MAX_PORT:
        allowed = f"a port of at most {_MAX_PORT - dp_rank}, for rank {dp_rank}"
        raise InvalidFieldError(field, f"port {port}", allowed, status=422)
    return f"{VLLM_P2P}{host}:{port + dp_rank}"


def block_protocols(addresses: Iterable[str]) -> set[str]:
    """Return the protocols spoken at some of `block_addresses`. Unknown addresses have none."""
    return {protocol for each in addresses if (protocol := _block_protocol(each)) is not None}


def usable_address(
    offered: Iterable[str], own: Sequence[str], protocols: Collection[str | None]
) -> str | None:
    """Return the first address at which a rank can read blocks of another; None if it cannot.

    `own`: addresses of the rank that reads; `protocols`: those spoken there. vLLM's peers are
    known by their address: its own one is no source.
    """
    for address in offered:
        protocol = _block_protocol(address)
        if protocol in protocols and not (protocol == VLLM_P2P and address in own):
            return address
    return None


def _block_protocol(address: str) -> str | None:
    if _OURS.fullmatch(address):
        return ""
    return VLLM_P2P if vllm_p2p_address(address) is not None else None


class RouterAnnouncement(Struct, frozen=True, kw_only=True):
    """A router, as it announces itself to the other routers."""

    router_id: UInt
    name: Name
    endpoint: Endpoint
    incarnation: UInt


Lifecycle: TypeAlias = Literal["schedulable", "cordoned", "draining"]


class WorkerOrder(Struct, frozen=True):
    """An operator's order about a worker. It outlives routers and workers."""

    lifecycle: Lifecycle


_worker_decoder = json.Decoder(WorkerAnnouncement)
_router_decoder = json.Decoder(RouterAnnouncement)
_order_decoder = json.Decoder(WorkerOrder)


def worker_key(worker_id: int | Literal["*"]) -> str:
    """Return the key of a worker's announcement, or the pattern of all workers' keys."""
    return f"worker.{worker_id}"


def router_key(router_id: int) -> str:
    """Return the key of a router's announcement."""
    return f"router.{router_id}"


def order_key(worker_id: int) -> str:
    """Return the key of an operator's order about a worker."""
    return f"order.{worker_id}"


def encode_entry(entry: WorkerAnnouncement | RouterAnnouncement | WorkerOrder) -> bytes:
    """Return the bytes of an entry."""
    return json.encode(entry)


def decode_worker(payload: bytes) -> WorkerAnnouncement:
    """Return a worker's announcement. Raises WireError if the bytes are invalid."""
    return decode(_worker_decoder.decode, payload)


def decode_router(payload: bytes) -> RouterAnnouncement:
    """Return a router's announcement. Raises WireError if the bytes are invalid."""
    return decode(_router_decoder.decode, payload)


def decode_order(payload: bytes) -> WorkerOrder:
    """Return an operator's order. Raises WireError if the bytes are invalid."""
    return decode(_order_decoder.decode, payload)

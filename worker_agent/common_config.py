"""What every worker agent can be told, whatever engine it serves."""

import socket
from typing import Annotated, Literal

from msgspec import Meta

from router.errors import ConfigError
from router.process.process_config import ProcessConfig
from router.process.settings import id_of_name
from router.protocol.catalogue import Enforcement, WorkerLabels
from router.protocol.subjects import NAMESPACE_PATTERN
from router.protocol.values import Endpoint, Rank, ranks_of
from router.sequence.naming import BlockNaming


class AgentConfig(ProcessConfig, frozen=True, kw_only=True):
    """Who an agent is, and how it talks to the fleet."""

    engine: Annotated[
        Literal["reference", "vllm", "sglang", "trtllm"],
        Meta(
            description=(
                "reference: an engine that the agent runs itself; vllm, sglang, "
                "trtllm: an engine that already runs"
            )
        ),
    ] = "reference"
    name: Annotated[
        str, Meta(min_length=1, max_length=256, description="stable name, such as the pod's")
    ] = socket.gethostname()
    worker_id: Annotated[
        int | None, Meta(description="stable id of the worker; by default derived from the name")
    ] = None
    namespace: Annotated[
        str, Meta(pattern=f"^{NAMESPACE_PATTERN}$", description="fleet to join on the bus")
    ] = "default"
    nats_url: Annotated[str, Meta(min_length=1, description="NATS server with JetStream")] = (
        "nats://127.0.0.1:4222"
    )
    routing_group: Annotated[
        str, Meta(min_length=1, max_length=256, description="routing group of the worker")
    ] = "default"
    role: Annotated[
        Literal["aggregated", "prefill", "decode"],
        Meta(
            description=(
                "prefill: only computes prompts; decode: only continues computed ones; "
                "aggregated: both"
            )
        ),
    ] = "aggregated"
    taints: Annotated[
        str | list[str],
        Meta(description="labels, comma-separated or a list, that requests may require or prefer"),
    ] = ""
    topology_domains: Annotated[
        str | dict[str, str],
        Meta(
            description=(
                "where the worker is, as zone=a,rack=7 or a table; these are taints as well"
            )
        ),
    ] = ""
    kv_transfer_domain: Annotated[
        str,
        Meta(
            description=("name of a topology domain within which a prompt computed here is decoded")
        ),
    ] = ""
    kv_transfer_enforcement: Annotated[
        Enforcement, Meta(description="required: it must be decoded there; preferred: it should be")
    ] = "required"
    lora_names: Annotated[
        str | list[str],
        Meta(
            description=(
                "LoRA adapters that the worker can serve, comma-separated or a list; empty: any"
            )
        ),
    ] = ""
    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 0
    endpoint: Annotated[
        Endpoint | None,
        Meta(description="URL of the engine for callers; by default the agent's own"),
    ] = None
    data_parallel_start_rank: Annotated[
        int, Meta(ge=0, le=65_535, description="number of the first data-parallel rank")
    ] = 0
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1, le=64, description="number of data-parallel ranks, each with a cache of its own"
        ),
    ] = 1
    load_interval_s: Annotated[
        float,
        Meta(
            gt=0, le=0.5, description="interval of load reports, which are the worker's heartbeats"
        ),
    ] = 0.4
    event_flush_s: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description=(
                "events are collected for this time and sent together; 0: the agent "
                "chooses, by fleet size"
            ),
        ),
    ] = 0.0
    event_stream_max_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="size limit of the event stream, if this agent creates it"),
    ] = 1 << 30
    num_replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=5,
            description=(
                "JetStream replicas of the stream and the bucket, if this agent creates them"
            ),
        ),
    ] = 1

    @property
    def id(self) -> int:
        """The worker id."""
        return id_of_name(self.name) if self.worker_id is None else self.worker_id

    def labels(self) -> WorkerLabels:
        """What requests may ask for in it. Raises ConfigError."""
        domains, domain = _table("topology_domains", self.topology_domains), self.kv_transfer_domain
        if domain and domain not in domains:
            allowed = f"one of topology_domains: {', '.join(domains) or 'none is given'}"
            raise ConfigError("kv_transfer_domain", repr(domain), allowed)
        return WorkerLabels(
            taints=_listed(self.taints),
            topology_domains=domains,
            kv_transfer_domain=domain or None,
            kv_transfer_enforcement=self.kv_transfer_enforcement if domain else None,
            lora_names=_listed(self.lora_names) or None,
        )

    @property
    def naming(self) -> BlockNaming:
        """What its blocks are called on the bus. Raises ConfigError."""
        return BlockNaming(self.read_block_key)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Its data-parallel ranks, in order."""
        return ranks_of(self.id, self.data_parallel_start_rank, self.data_parallel_size)


def _listed(said: str | list[str]) -> list[str]:
    parts = said.split(",") if isinstance(said, str) else said
    return [part.strip() for part in parts if part.strip()]


def _table(key: str, said: str | dict[str, str]) -> dict[str, str]:
    """`a=x,b=y` as a mapping. Raises ConfigError."""
    if not isinstance(said, str):
        return said
    table: dict[str, str] = {}
    for part in _listed(said):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value) or name in table:
            raise ConfigError(key, repr(part), "domain=place, each domain once")
        table[name] = value
    return table

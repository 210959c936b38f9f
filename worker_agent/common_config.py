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
        Meta(description="reference, which the agent runs itself, or one to stand beside"),
    ] = "reference"
    name: Annotated[
        str, Meta(min_length=1, max_length=256, description="stable name, such as the pod's")
    ] = socket.gethostname()
    worker_id: Annotated[
        int | None, Meta(description="stable id; by default made from the name")
    ] = None
    namespace: Annotated[
        str, Meta(pattern=f"^{NAMESPACE_PATTERN}$", description="fleet to join on the bus")
    ] = "default"
    nats_url: Annotated[str, Meta(min_length=1, description="NATS server with JetStream")] = (
        "nats://127.0.0.1:4222"
    )
    routing_group: Annotated[
        str, Meta(min_length=1, max_length=256, description="group of workers it belongs to")
    ] = "default"
    role: Annotated[
        Literal["aggregated", "prefill", "decode"], Meta(description="part of the work it does")
    ] = "aggregated"
    taints: Annotated[
        str | list[str],
        Meta(description="comma-separated or a list; requests may require or prefer them"),
    ] = ""
    topology_domains: Annotated[
        str | dict[str, str],
        Meta(description="where it is, as zone=a,rack=7 or a table; taints, too"),
    ] = ""
    kv_transfer_domain: Annotated[
        str, Meta(description="of those, within which what it has computed must be decoded")
    ] = ""
    kv_transfer_enforcement: Annotated[
        Enforcement, Meta(description="must be (required), or should be (preferred)")
    ] = "required"
    lora_names: Annotated[
        str | list[str], Meta(description="adapters that it can serve, likewise; empty: any")
    ] = ""
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port; 0 takes a free one")] = 0
    endpoint: Annotated[
        Endpoint | None, Meta(description="engine's URL for callers; by default, the agent's own")
    ] = None
    data_parallel_start_rank: Annotated[int, Meta(ge=0, le=65_535, description="first rank")] = 0
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="ranks, each with a cache of its own")
    ] = 1
    load_interval_s: Annotated[
        float, Meta(gt=0, le=0.5, description="between load reports, which are heartbeats")
    ] = 0.4
    event_flush_s: Annotated[
        float,
        Meta(ge=0, le=0.5, description="events of this time travel together; 0: by fleet size"),
    ] = 0.0
    event_stream_max_bytes: Annotated[
        int, Meta(ge=1 << 20, description="event stream, where this agent creates it")
    ] = 1 << 30
    num_replicas: Annotated[
        int, Meta(ge=1, le=5, description="replicas of stream and bucket, where created here")
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

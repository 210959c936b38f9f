"""The settings of every worker agent, whichever engine it serves."""

import socket
from typing import Annotated, ClassVar, Literal

from msgspec import Struct

from router.errors import ConfigError
from router.protocol.catalogue import Enforcement, WorkerLabels
from router.protocol.subjects import NAMESPACE_PATTERN
from router.protocol.values import Endpoint, Rank, ranks_of
from router.runtime.process.settings import COMMON, about, id_of_name


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """Identity of a worker."""

    GROUP: ClassVar[str] = "this worker"

    name: Annotated[
        str, about("stable name, such as the pod's", COMMON, min_length=1, max_length=256)
    ] = socket.gethostname()
    worker_id: Annotated[
        int | None, about("stable id of the worker; by default derived from the name", unit="ID")
    ] = None
    namespace: Annotated[
        str,
        about(
            "fleet to join on the bus",
            COMMON,
            pattern=f"^{NAMESPACE_PATTERN}$",
            form="letters, digits, _ and -, at most 64 of them",
        ),
    ] = "default"

    @property
    def id(self) -> int:
        """The worker id."""
        return id_of_name(self.name) if self.worker_id is None else self.worker_id


class AgentBusConfig(Struct, frozen=True, kw_only=True):
    """The bus, and how the agent publishes on it."""

    GROUP: ClassVar[str] = "NATS"

    nats_url: Annotated[str, about("NATS server with JetStream", COMMON, min_length=1)] = (
        "nats://127.0.0.1:4222"
    )
    event_flush_s: Annotated[
        float,
        about(
            "events are collected for this time and sent together; 0: the agent "
            "chooses, by fleet size",
            ge=0,
            le=0.5,
        ),
    ] = 0.0
    event_stream_max_bytes: Annotated[
        int, about("size limit of the event stream, if this agent creates it", ge=1 << 20)
    ] = 1 << 30
    num_replicas: Annotated[
        int,
        about(
            "JetStream replicas of the stream and the bucket, if this agent creates them",
            ge=1,
            le=5,
            unit="REPLICAS",
        ),
    ] = 1


class AgentConfig(Struct, frozen=True, kw_only=True):
    """The agent's place in the fleet: engine, routing group, labels and ranks."""

    GROUP: ClassVar[str] = "this worker"

    engine: Annotated[
        Literal["reference", "vllm", "sglang", "trtllm"],
        about(
            "reference: an engine that the agent runs itself; vllm, sglang, "
            "trtllm: an engine that already runs",
            COMMON,
        ),
    ] = "reference"
    routing_group: Annotated[
        str, about("routing group of the worker", COMMON, min_length=1, max_length=256)
    ] = "default"
    role: Annotated[
        Literal["aggregated", "prefill", "decode"],
        about(
            "prefill: only computes prompts; decode: only continues them; aggregated: both",
            COMMON,
        ),
    ] = "aggregated"
    taints: Annotated[
        str | list[str],
        about(
            "labels, comma-separated or a list, that requests may require or prefer", unit="LABEL,…"
        ),
    ] = ""
    topology_domains: Annotated[
        str | dict[str, str],
        about(
            "topology of the worker, as zone=a,rack=7 or a table; these are taints as well",
            unit="DOMAIN=PLACE,…",
        ),
    ] = ""
    kv_transfer_domain: Annotated[
        str,
        about(
            "name of a topology domain within which a prompt computed here is decoded",
            unit="DOMAIN",
        ),
    ] = ""
    kv_transfer_enforcement: Annotated[
        Enforcement, about("required: it must be decoded there; preferred: it should be")
    ] = "required"
    lora_names: Annotated[
        str | list[str],
        about(
            "LoRA adapters that the worker can serve, comma-separated or a list; empty: any",
            unit="NAME,…",
        ),
    ] = ""
    endpoint: Annotated[
        Endpoint | None,
        about("URL of the engine for callers; by default the agent's own", COMMON, unit="URL"),
    ] = None
    data_parallel_start_rank: Annotated[
        int, about("number of the first data-parallel rank", ge=0, le=65_535, unit="RANK")
    ] = 0
    data_parallel_size: Annotated[
        int,
        about(
            "number of data-parallel ranks, each with a cache of its own",
            COMMON,
            ge=1,
            le=64,
            unit="RANKS",
        ),
    ] = 1
    load_interval_s: Annotated[
        float, about("interval of load reports, which are the worker's heartbeats", gt=0, le=0.5)
    ] = 0.4

    def labels(self) -> WorkerLabels:
        """Return the labels that requests may require or prefer. Raises ConfigError."""
        domains, domain = _table("topology_domains", self.topology_domains), self.kv_transfer_domain
        if domain and domain not in domains:
            allowed = f"one of topology_domains: {', '.join(domains) or 'none is given'}"
            raise ConfigError("kv_transfer_domain", repr(domain), allowed)
        return WorkerLabels(
            taints=listed(self.taints),
            topology_domains=domains,
            kv_transfer_domain=domain or None,
            kv_transfer_enforcement=self.kv_transfer_enforcement if domain else None,
            lora_names=listed(self.lora_names) or None,
        )

    def ranks(self, worker_id: int) -> tuple[Rank, ...]:
        """Return the data-parallel ranks of a worker, in order."""
        return ranks_of(worker_id, self.data_parallel_start_rank, self.data_parallel_size)


def listed(text: str | list[str]) -> list[str]:
    """Return the parts of a comma-separated text or a list, without empty ones."""
    parts = text.split(",") if isinstance(text, str) else text
    return [part.strip() for part in parts if part.strip()]


def _table(key: str, text: str | dict[str, str]) -> dict[str, str]:
    """Return `a=x,b=y` as a mapping. Raises ConfigError."""
    if not isinstance(text, str):
        return text
    table: dict[str, str] = {}
    for part in listed(text):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value) or name in table:
            raise ConfigError(key, repr(part), "domain=place, each domain once")
        table[name] = value
    return table

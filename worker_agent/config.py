"""Configuration of the worker agent; `kv-worker-agent run --help` prints it."""

import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.process.settings import AGENT_PREFIX, id_of_name, load
from router.protocol.subjects import NAMESPACE_PATTERN
from router.protocol.values import SCHEME, Endpoint, Identity, Rank, ranks_of


class AgentConfig(Struct, frozen=True, kw_only=True):
    """Everything an agent and its reference engine can be told."""

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
    model_name: Annotated[str, Meta(min_length=1, max_length=256, description="model served")] = (
        "default"
    )
    routing_group: Annotated[
        str, Meta(min_length=1, max_length=256, description="group of workers it belongs to")
    ] = "default"
    role: Annotated[
        Literal["aggregated", "prefill", "decode"], Meta(description="part of the work it does")
    ] = "aggregated"
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port; 0 takes a free one")] = 0
    endpoint: Annotated[
        Endpoint | None, Meta(description="URL for callers; by default as listened on")
    ] = None
    data_parallel_start_rank: Annotated[int, Meta(ge=0, le=65_535, description="first rank")] = 0
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="ranks, each with a pool of its own")
    ] = 1
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in a block")] = 16
    num_blocks: Annotated[int, Meta(ge=1, description="blocks in the pool of each rank")] = 2048
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, description="tokens in a step: every decode, then chunks of prefill")
    ] = 256
    max_running_requests: Annotated[int, Meta(ge=1, description="running at once, a rank")] = 16
    max_waiting_requests: Annotated[
        int, Meta(ge=1, description="waiting, a rank; beyond, the engine answers 429")
    ] = 1024
    max_model_len: Annotated[
        int, Meta(ge=16, le=65_536, description="prompt and output tokens of a request")
    ] = 4096
    num_layers: Annotated[int, Meta(ge=1, le=64, description="of the reference model")] = 4
    hidden_size: Annotated[int, Meta(ge=16, le=4096, description="of the reference model")] = 256
    num_heads: Annotated[int, Meta(ge=1, le=64, description="query heads")] = 8
    num_kv_heads: Annotated[int, Meta(ge=1, le=64, description="key and value heads")] = 2
    seed: Annotated[int, Meta(ge=0, description="of the reference model's weights")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: CUDA where there is one")
    ] = "auto"
    num_threads: Annotated[int, Meta(ge=1, le=256, description="of torch on the CPU")] = 1
    load_interval_s: Annotated[
        float, Meta(gt=0, le=0.5, description="between load reports, which are heartbeats")
    ] = 0.4
    event_flush_s: Annotated[
        float,
        Meta(ge=0, le=0.5, description="events of this time travel together; 0: by fleet size"),
    ] = 0.0
    drain_s: Annotated[float, Meta(ge=0, description="after SIGTERM: time for requests to end")] = (
        10.0
    )
    event_stream_max_bytes: Annotated[
        int, Meta(ge=1 << 20, description="event stream, where this agent creates it")
    ] = 1 << 30
    num_replicas: Annotated[
        int, Meta(ge=1, le=5, description="replicas of stream and bucket, where created here")
    ] = 1
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="debug, info, warning or error"),
    ] = "info"

    @property
    def id(self) -> int:
        """The worker id."""
        return id_of_name(self.name) if self.worker_id is None else self.worker_id

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Its data-parallel ranks, in order."""
        return ranks_of(self.id, self.data_parallel_start_rank, self.data_parallel_size)

    @property
    def identity(self) -> Identity:
        """How its blocks are named."""
        return Identity(SCHEME, self.block_size)


def load_agent_config(arguments: Sequence[str], environment: Mapping[str, str]) -> AgentConfig:
    """The agent's configuration. Raises ConfigError, also for contradictions."""
    config = load(AgentConfig, arguments, environment, AGENT_PREFIX)
    _divides("num_heads", config.num_heads, "hidden_size", config.hidden_size)
    _divides("num_kv_heads", config.num_kv_heads, "num_heads", config.num_heads)
    if (config.hidden_size // config.num_heads) % 2:
        raise ConfigError("hidden_size", "odd head dimension", "an even multiple of num_heads")
    if config.worker_id is not None and not 0 <= config.worker_id < 1 << 64:
        raise ConfigError("worker_id", str(config.worker_id), "0 to 2^64 - 1")
    if config.max_model_len > config.num_blocks * config.block_size:
        capacity = config.num_blocks * config.block_size
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit in a pool of {capacity}",
            "at most num_blocks × block_size",
        )
    return config


def _divides(name: str, divisor: int, of: str, number: int) -> None:
    if number % divisor:
        raise ConfigError(name, f"{divisor} does not divide {of} {number}", f"a divisor of {of}")

"""Configuration of the worker agent; `kv-worker-agent run [--engine …] --help` prints it.

An agent runs an engine of its own (`ReferenceConfig`), or stands beside one (`BridgeConfig`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from router.errors import ConfigError
from router.process.aliases import Alias, check_variables
from router.process.settings import AGENT_PREFIX, Loaded, first_look, load_with_sources
from router.protocol.values import Identity
from router.publisher.metrics_dialects import EngineKind
from router.security.config import check_security
from worker_agent.bridge_config import BridgeConfig, rank_addresses
from worker_agent.common_config import AgentConfig
from worker_agent.kvbm_names import ALIASES, PREFIX, REFUSED
from worker_agent.sharing_settings import SharingSettings, check_sharing
from worker_agent.tier_settings import check_tiers

T = TypeVar("T", bound=AgentConfig)

REFERENCE = "reference"
_ENGINES: tuple[str, ...] = (REFERENCE, *get_args(EngineKind))


class ReferenceConfig(SharingSettings, frozen=True, kw_only=True):
    """An agent that is its own engine: the reference engine."""

    model_name: Annotated[
        str, Meta(min_length=1, max_length=256, description="name of the model that is served")
    ] = "default"
    block_size: Annotated[
        int, Meta(ge=1, le=1024, description="tokens in a block; a power of two")
    ] = 16
    num_blocks: Annotated[int, Meta(ge=1, description="blocks in the pool of each rank")] = 2048
    kv_layout: Annotated[
        Literal["contiguous", "block_first", "block_second"],
        Meta(description="layout of blocks on the device: in one piece, or layer by layer"),
    ] = "contiguous"
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=16,
            description=(
                "tokens in a step of the engine: first every decode, then chunks of prefill"
            ),
        ),
    ] = 256
    max_running_requests: Annotated[
        int, Meta(ge=1, description="requests running at once on each rank")
    ] = 16
    max_waiting_requests: Annotated[
        int,
        Meta(
            ge=1, description="requests waiting on each rank; beyond that, the engine answers 429"
        ),
    ] = 1024
    max_model_len: Annotated[
        int,
        Meta(ge=16, le=65_536, description="most tokens of a request, prompt and output together"),
    ] = 4096
    num_layers: Annotated[int, Meta(ge=1, le=64, description="of the reference model")] = 4
    hidden_size: Annotated[int, Meta(ge=16, le=4096, description="of the reference model")] = 256
    num_heads: Annotated[
        int, Meta(ge=1, le=64, description="query heads of the reference model")
    ] = 8
    num_kv_heads: Annotated[
        int, Meta(ge=1, le=64, description="key and value heads of the reference model")
    ] = 2
    seed: Annotated[int, Meta(ge=0, description="seed of the reference model's weights")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="torch device; auto: CUDA if there is a GPU"),
    ] = "auto"
    num_threads: Annotated[int, Meta(ge=1, le=256, description="threads of torch on the CPU")] = 1
    drain_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM: time for running requests to end")
    ] = 10.0

    @property
    def identity(self) -> Identity:
        """How its blocks are named."""
        return Identity(self.naming.scheme, self.block_size)


def load_agent_config(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> ReferenceConfig | BridgeConfig:
    """The agent's configuration. Raises ConfigError, also for contradictions."""
    engine = first_look("engine", arguments, environment, AGENT_PREFIX) or REFERENCE
    if engine not in _ENGINES:
        raise ConfigError("engine", f"{engine!r} is none", ", ".join(_ENGINES))
    config = _load(engine == REFERENCE, arguments, environment)
    if config.worker_id is not None and not 0 <= config.worker_id < 1 << 64:
        raise ConfigError("worker_id", str(config.worker_id), "0 to 2^64 - 1")
    config.labels()
    return config


def _load(
    is_reference: bool, arguments: Sequence[str], environment: Mapping[str, str]
) -> ReferenceConfig | BridgeConfig:
    if is_reference:
        elsewhere = _only_in(BridgeConfig, ReferenceConfig, "beside an engine: --engine vllm, …")
        check_variables(environment, PREFIX, ALIASES, REFUSED)
        loaded = _loaded(ReferenceConfig, arguments, environment, elsewhere, ALIASES)
        check_tiers(loaded.config, loaded.sources)
        check_sharing(loaded.config, loaded.sources)
        _check_reference(loaded.config)
        return loaded.shown()
    elsewhere = _only_in(ReferenceConfig, BridgeConfig, "with --engine reference")
    bridge = _loaded(BridgeConfig, arguments, environment, elsewhere).shown()
    rank_addresses(bridge)
    return bridge


def _loaded(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    elsewhere: Mapping[str, str],
    aliases: Sequence[Alias] = (),
) -> Loaded[T]:
    loaded = load_with_sources(
        config_type, arguments, environment, AGENT_PREFIX, elsewhere, aliases
    )
    check_security(loaded.config, loaded.sources)
    return loaded


def _only_in(config_type: type[Struct], other: type[Struct], where: str) -> Mapping[str, str]:
    """Settings of one kind of agent that the other has not."""
    ours, theirs = (
        {field.name for field in msgspec.structs.fields(each)} for each in (config_type, other)
    )
    return dict.fromkeys(sorted(ours - theirs), where)


def _check_reference(config: ReferenceConfig) -> None:
    _divides("num_heads", config.num_heads, "hidden_size", config.hidden_size)
    _divides("num_kv_heads", config.num_kv_heads, "num_heads", config.num_heads)
    if (config.hidden_size // config.num_heads) % 2:
        raise ConfigError("hidden_size", "odd head dimension", "an even multiple of num_heads")
    if config.block_size & (config.block_size - 1):
        raise ConfigError("block_size", str(config.block_size), "a power of two")
    if config.max_model_len > config.num_blocks * config.block_size:
        capacity = config.num_blocks * config.block_size
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit in a pool of {capacity}",
            "at most num_blocks × block_size",
        )


def _divides(name: str, divisor: int, of: str, number: int) -> None:
    if number % divisor:
        raise ConfigError(name, f"{divisor} does not divide {of} {number}", f"a divisor of {of}")

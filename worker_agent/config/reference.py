"""Configuration of the worker agent, printed by `kv-worker-agent run [--engine …] --help`.

An agent runs its own engine (`ReferenceConfig`), or serves one next to it (`BridgeConfig`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar, get_args

from msgspec import Struct

from router.errors import ConfigError
from router.protocol.values import Identity
from router.publisher.engine_metrics.dialects import EngineKind
from router.runtime.http_server.config import HttpServerConfig, LogConfig
from router.runtime.process.aliases import Alias, check_variables
from router.runtime.process.loading import Loaded, first_pass, load_with_sources
from router.runtime.process.settings import AGENT_PREFIX, COMMON, about, settings_of
from router.runtime.security.config import (
    BlockKeyConfig,
    NatsConfig,
    SecurityConfig,
    check_security,
)
from worker_agent.config.base import AgentBusConfig, AgentConfig, WorkerConfig
from worker_agent.config.bridge import BridgeConfig, rank_addresses
from worker_agent.config.kvbm_aliases import ALIASES, PREFIX, REFUSED
from worker_agent.config.sharing import SharingSettings, check_sharing
from worker_agent.config.tiers import TierSettings, check_tiers

if TYPE_CHECKING:
    from router.sequence.hashing.keyed_hashes import HashKeying

REFERENCE = "reference"
_ENGINES: tuple[str, ...] = (REFERENCE, *get_args(EngineKind))


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The reference engine and its model."""

    GROUP: ClassVar[str] = "engine"

    model_name: Annotated[
        str, about("name of the model that is served", COMMON, min_length=1, max_length=256)
    ] = "default"
    block_size: Annotated[
        int, about("tokens in a block; a power of two", COMMON, ge=1, le=1024)
    ] = 16
    num_blocks: Annotated[int, about("blocks in the pool of each rank", COMMON, ge=1)] = 2048
    kv_layout: Annotated[
        Literal["contiguous", "block_first", "block_second"],
        about("layout of blocks on the device: in one piece, or layer by layer"),
    ] = "contiguous"
    kv_page: Annotated[
        Literal["nhd", "hnd"],
        about(
            "order within a layer's part of a block: tokens or heads first; workers with another "
            "order cannot use its blocks"
        ),
    ] = "nhd"
    max_num_batched_tokens: Annotated[
        int,
        about("tokens in a step of the engine: first every decode, then chunks of prefill", ge=16),
    ] = 256
    max_running_requests: Annotated[int, about("requests running at once on each rank", ge=1)] = 16
    max_waiting_requests: Annotated[
        int, about("requests waiting on each rank; beyond that, the engine responds 429", ge=1)
    ] = 1024
    max_model_len: Annotated[
        int,
        about(
            "most tokens of a request, prompt and output together", ge=16, le=65_536, unit="TOKENS"
        ),
    ] = 4096
    num_layers: Annotated[int, about("layers of the model", ge=1, le=64, unit="LAYERS")] = 4
    hidden_size: Annotated[int, about("hidden size of the model", ge=16, le=4096, unit="SIZE")] = (
        256
    )
    num_heads: Annotated[
        int, about("query heads of the reference model", ge=1, le=64, unit="HEADS")
    ] = 8
    num_kv_heads: Annotated[
        int, about("key and value heads of the reference model", ge=1, le=64, unit="HEADS")
    ] = 2
    seed: Annotated[int, about("seed of the reference model's weights", ge=0, unit="SEED")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("torch device; auto: CUDA if there is a GPU", COMMON)
    ] = "auto"
    num_threads: Annotated[int, about("threads of torch on the CPU", ge=1, le=256)] = 1
    drain_s: Annotated[float, about("after SIGTERM: time for running requests to end", ge=0)] = 10.0


class ReferenceConfig(Struct, frozen=True, kw_only=True):
    """Settings of an agent that runs its own engine: the reference engine."""

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig()
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    worker: WorkerConfig = WorkerConfig()
    agent: AgentConfig = AgentConfig()
    bus: AgentBusConfig = AgentBusConfig()
    tiers: TierSettings = TierSettings()
    sharing: SharingSettings = SharingSettings()
    engine: EngineSettings = EngineSettings()

    @property
    def naming(self) -> "HashKeying":
        """The hash scheme of its blocks on the bus. Raises ConfigError."""
        from router.sequence.hashing.keyed_hashes import HashKeying

        return HashKeying(self.block_keys.read())

    @property
    def identity(self) -> Identity:
        """The identity of its block hashes."""
        return Identity(self.naming.scheme, self.engine.block_size)


T = TypeVar("T", ReferenceConfig, BridgeConfig)


def load_agent_config(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> ReferenceConfig | BridgeConfig:
    """Return the agent's configuration. Raises ConfigError, also for contradictions."""
    engine = first_pass("engine", arguments, environment, AGENT_PREFIX) or REFERENCE
    if engine not in _ENGINES:
        raise ConfigError("engine", f"{engine!r} is unknown", ", ".join(_ENGINES))
    config = _load(engine == REFERENCE, arguments, environment)
    worker_id = config.worker.worker_id
    if worker_id is not None and not 0 <= worker_id < 1 << 64:
        raise ConfigError("worker_id", str(worker_id), "0 to 2^64 - 1")
    config.agent.labels()
    return config


def _load(
    is_reference: bool, arguments: Sequence[str], environment: Mapping[str, str]
) -> ReferenceConfig | BridgeConfig:
    if is_reference:
        elsewhere = _only_in(BridgeConfig, ReferenceConfig, "next to an engine: --engine vllm, …")
        check_variables(environment, PREFIX, ALIASES, REFUSED)
        loaded = _loaded(ReferenceConfig, arguments, environment, elsewhere, ALIASES)
        check_tiers(loaded.config, loaded.sources)
        check_sharing(loaded.config, loaded.config.sharing.share_ca_file, loaded.sources)
        _check_engine(loaded.config.engine)
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
    config = loaded.config
    check_security(config, config.security, config.block_keys, loaded.sources)
    return loaded


def _only_in(config_type: type[Struct], other: type[Struct], where: str) -> Mapping[str, str]:
    """Return the settings that only one of the two kinds of agent has."""
    ours, theirs = (
        {setting.name for setting in settings_of(each())} for each in (config_type, other)
    )
    return dict.fromkeys(sorted(ours - theirs), where)


def _check_engine(config: EngineSettings) -> None:
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

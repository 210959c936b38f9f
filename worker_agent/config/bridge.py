"""Configuration of an agent next to an engine that manages its own blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError, InvalidFieldError
from router.protocol.catalogue import vllm_p2p_endpoint
from router.protocol.hybrid import HybridSettings
from router.protocol.values import Name, Rank, number_in
from router.publisher.batch_order.address import EngineAddress, rank_endpoint
from router.publisher.engine_metrics.dialects import EngineKind, EngineLimits
from router.runtime.http_server.config import HttpServerConfig, LogConfig
from router.runtime.process.settings import COMMON, about
from router.runtime.security.config import BlockKeyConfig, NatsConfig, SecurityConfig
from worker_agent.config.base import AgentBusConfig, AgentConfig, WorkerConfig, listed
from worker_agent.config.sharing import rank_address

if TYPE_CHECKING:
    from router.sequence.hashing.keyed_hashes import HashKeying

HttpUrl: TypeAlias = Annotated[str, Meta(pattern="^https?://[^/]+")]
BlockSize: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
Size: TypeAlias = Annotated[int, Meta(ge=1)]

AUTO = "auto"
DEFAULT_EVENTS = "tcp://127.0.0.1:5557"


class EngineConfig(Struct, frozen=True, kw_only=True):
    """The engine next to the agent. Sizes that are not set are read from its metrics."""

    GROUP: ClassVar[str] = "engine"

    zmq: Annotated[
        str,
        about(
            "ZMQ endpoint of the engine's cache events: that of rank 0, with the "
            "rank added to its port, or one for each rank, separated by commas",
            COMMON,
            unit="ENDPOINT",
        ),
    ] = DEFAULT_EVENTS
    replay: Annotated[
        str | None,
        about(
            "ZMQ endpoint where the engine replays events, given likewise; without "
            "it, lost events cannot be recovered",
            COMMON,
            unit="ENDPOINT",
        ),
    ] = None
    topic: Annotated[str, about("prefix of the topics to subscribe to", COMMON, unit="TOPIC")] = ""
    load: Annotated[
        str | None,
        about(
            "ZMQ endpoint of SGLang's load reports, given likewise; auto: where "
            "SGLang's --load-publish-endpoint auto puts it. By default the load is "
            "read from metrics_url",
            unit="ENDPOINT",
        ),
    ] = None
    tiers: Annotated[
        str | None,
        about(
            "ZMQ endpoint of a block manager in the engine that reports its host, "
            "disk and remote tiers, given likewise; merged with the engine's own "
            "events",
            unit="ENDPOINT",
        ),
    ] = None
    share_listen: Annotated[
        str | None,
        about(
            "share_listen of the vLLM connector in the engine, with the same value, or one for "
            "each rank: it is announced, so that routers name the engine as source of blocks",
            unit="ENDPOINT",
        ),
    ] = None
    p2p_listen: Annotated[
        str | None,
        about(
            "side channel of vLLM's own P2P tier, with the engine's own value of "
            "VLLM_P2P_SIDE_CHANNEL_HOST and _PORT, or one for each rank: it is announced, so that "
            "routers name the engine as source of blocks to engines that have one, too",
            unit="HOST:PORT",
        ),
    ] = None
    control_listen: Annotated[
        str | None,
        about(
            "control_listen of the vLLM connector in the engine, with the same value: commands on "
            "tiers are forwarded to it, and the addresses of other engines with share_listen",
            unit="ENDPOINT",
        ),
    ] = None
    rank_workers: Annotated[
        int,
        about(
            "workers of each data-parallel rank (tensor × pipeline parallel), each of which has "
            "its part of a block: the first of rank r is number r × rank_workers",
            ge=1,
            le=1024,
        ),
    ] = 1
    events_url: Annotated[
        HttpUrl | None,
        about(
            "URL to poll for events of a TensorRT-LLM engine that does not stream "
            "them, such as http://127.0.0.1:8000/kv_cache_events; nothing else may "
            "poll it",
            form="http://host:port/path",
        ),
    ] = None
    metrics_url: Annotated[
        HttpUrl | None,
        about(
            "URL of the engine's Prometheus metrics, such as http://127.0.0.1:8000/metrics",
            COMMON,
            form="http://host:port/path",
        ),
    ] = None
    metrics_interval_s: Annotated[
        float, about("interval at which the metrics are read", gt=0, le=2.5)
    ] = 0.5
    model_name: Annotated[
        Name | None, about("name of the model; by default the one that the engine reports", COMMON)
    ] = None
    block_size: Annotated[BlockSize | None, about("tokens in a block", COMMON)] = None
    total_kv_blocks: Annotated[Size | None, about("blocks in the cache of each rank", COMMON)] = (
        None
    )
    max_num_batched_tokens: Annotated[
        Size | None, about("tokens in a step of the engine; 2048 if the engine does not report it")
    ] = None
    eagle: Annotated[
        bool, about("the engine speculates with EAGLE, and hashes pairs of tokens")
    ] = False
    report_mode: Annotated[
        Literal["new", "full"],
        about(
            "full: the engine may report blocks again that it already holds, if "
            "a client requests it"
        ),
    ] = "new"
    chunk_tokens: Annotated[
        Size | None, about("chunk of a hybrid model's local attention, in tokens")
    ] = None
    eagle_groups: Annotated[
        str | list[str],
        about(
            "groups of layers whose last block the engine drops of a hit, comma-separated",
            unit="GROUP,…",
        ),
    ] = ""
    silent_block_sizes: Annotated[
        str | list[str],
        about(
            "block sizes of groups of layers that are never cached, comma-separated",
            unit="TOKENS,…",
        ),
    ] = ""
    state_dir: Annotated[
        str | None,
        about(
            "folder for the state of the engine's event stream, so that a "
            "restarted agent can continue"
        ),
    ] = None

    @property
    def hybrid(self) -> HybridSettings:
        """The part of a hybrid model's layout that no event contains. Raises ConfigError."""
        if self.eagle and self.eagle_groups:
            allowed = "one of the two: eagle_groups for a hybrid model of vLLM, eagle for SGLang"
            raise ConfigError("eagle_groups", "given beside eagle", allowed)
        return HybridSettings(
            self.chunk_tokens,
            _numbers("eagle_groups", self.eagle_groups, 0, 65_535),
            _numbers("silent_block_sizes", self.silent_block_sizes, 1, 1 << 20),
        )

    @property
    def given_facts(self) -> EngineLimits:
        """The facts on the engine that are configured."""
        return EngineLimits(
            self.model_name, self.block_size, self.total_kv_blocks, self.max_num_batched_tokens
        )


class BridgeConfig(Struct, frozen=True, kw_only=True):
    """Settings of an agent next to an engine."""

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig()
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    worker: WorkerConfig = WorkerConfig()
    agent: AgentConfig = AgentConfig()
    bus: AgentBusConfig = AgentBusConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def kind(self) -> EngineKind:
        """The kind of engine that the agent serves."""
        assert self.agent.engine != "reference"
        return self.agent.engine

    @property
    def naming(self) -> "HashKeying":
        """The hash scheme of its blocks on the bus. Raises ConfigError."""
        from router.sequence.hashing.keyed_hashes import HashKeying

        return HashKeying(self.block_keys.read())


class RankAddresses(Struct, frozen=True):
    """The sockets of one rank. `blocks`: where other engines read its blocks.

    `p2p`: the same of vLLM's own P2P tier. `control`: where its workers receive commands.
    """

    rank: Rank
    engine: EngineAddress
    load: str | None
    tiers: str | None
    blocks: str | None = None
    control: tuple[str, ...] = ()
    p2p: str | None = None

    @property
    def shared(self) -> list[str]:
        """Where other engines read its blocks, by any protocol."""
        return [each for each in (self.blocks, self.p2p) if each is not None]


def rank_addresses(config: BridgeConfig) -> list[RankAddresses]:
    """Return the sockets of each rank. Raises ConfigError, also for missing settings."""
    _check_sources(config.agent, config.engine)
    engine, ranks = config.engine, config.agent.ranks(config.worker.id)
    events = _per_rank("zmq", engine.zmq, ranks)
    replays = _per_rank("replay", engine.replay, ranks)
    # The checks above have ensured that `zmq` has a port, which `auto` needs.
    loads = _per_rank("load", _load_endpoint(config.agent, engine), ranks)
    tiers = _per_rank("tiers", engine.tiers, ranks)
    blocks = _blocks_at(engine, ranks)
    side_channels = _p2p_at(engine, ranks)
    each = zip(ranks, events, replays, loads, tiers, blocks, side_channels, strict=True)
    return [
        RankAddresses(
            rank,
            EngineAddress(event, replay, engine.topic),
            load,
            tier,
            at,
            _control_of(engine, rank),
            p2p,
        )
        for rank, event, replay, load, tier, at, p2p in each
        if event is not None
    ]


def _blocks_at(engine: EngineConfig, ranks: Sequence[Rank]) -> list[str | None]:
    """Return where the first worker of each rank gives blocks."""
    key, text = "share_listen", engine.share_listen
    if text is None:
        return [None for _ in ranks]
    addresses = listed(text)
    if len(addresses) == 1:
        numbers = [rank.dp_rank * engine.rank_workers for rank in ranks]
        return [rank_address(key, addresses[0], number) for number in numbers]
    return _each_ones(key, [rank_address(key, each, 0) for each in addresses], ranks)


def _p2p_at(engine: EngineConfig, ranks: Sequence[Rank]) -> list[str | None]:
    """Return the side channel of each rank's P2P tier: vLLM adds the rank to the port."""
    key, text = "p2p_listen", engine.p2p_listen
    if text is None:
        return [None for _ in ranks]
    places = listed(text)
    try:
        if len(places) == 1:
            return [vllm_p2p_endpoint(places[0], rank.dp_rank, key) for rank in ranks]
        return _each_ones(key, [vllm_p2p_endpoint(each, 0, key) for each in places], ranks)
    except InvalidFieldError as error:
        raise ConfigError(key, error.reason, error.allowed) from error


def _control_of(engine: EngineConfig, rank: Rank) -> tuple[str, ...]:
    """Return where each worker of a rank receives commands."""
    if engine.control_listen is None:
        return ()
    first = rank.dp_rank * engine.rank_workers
    return tuple(
        rank_address("control_listen", engine.control_listen, first + number)
        for number in range(engine.rank_workers)
    )


def _check_sources(agent: AgentConfig, engine: EngineConfig) -> None:
    if agent.endpoint is None:
        raise ConfigError("endpoint", "missing", "the engine's URL for callers, http://host:port")
    if engine.p2p_listen is not None and agent.engine != "vllm":
        raise ConfigError("p2p_listen", f"{agent.engine} has no such tier", "with --engine vllm")
    if engine.load is not None and agent.engine != "sglang":
        raise ConfigError("load", f"{agent.engine} has no load socket", "with --engine sglang")
    if engine.events_url is not None:
        _check_pulled(agent, engine)
    if engine.metrics_url is None:
        for name in ("block_size", "total_kv_blocks"):
            if getattr(engine, name) is None:
                problem = "missing, and there is no metrics_url to learn it from"
                raise ConfigError(name, problem, "either of the two")


def _check_pulled(agent: AgentConfig, engine: EngineConfig) -> None:
    if agent.engine != "trtllm":
        raise ConfigError("events_url", f"{agent.engine} streams its events", "zmq and replay")
    for name, default in (("zmq", DEFAULT_EVENTS), ("replay", None), ("topic", "")):
        if getattr(engine, name) != default:
            raise ConfigError(name, "given beside events_url", "either of the two")


def _per_rank(key: str, text: str | None, ranks: Sequence[Rank]) -> list[str | None]:
    """Return one checked endpoint for each rank."""
    if text is None:
        return [None for _ in ranks]
    endpoints = [part.strip() for part in text.split(",")]
    try:
        if len(endpoints) == 1:
            return [rank_endpoint(endpoints[0], rank.dp_rank, key) for rank in ranks]
        checked = [rank_endpoint(endpoint, 0, key) for endpoint in endpoints]
    except InvalidFieldError as error:
        raise ConfigError(key, error.reason, error.allowed) from error
    return _each_ones(key, checked, ranks)


def _each_ones(key: str, endpoints: list[str], ranks: Sequence[Rank]) -> list[str | None]:
    """Return the endpoints given one by one. Raises ConfigError unless each rank has its own."""
    if len(endpoints) != len(ranks):
        problem = f"{len(endpoints)} endpoints for {len(ranks)} ranks"
        raise ConfigError(key, problem, "one for rank 0, or one for each rank")
    if len(set(endpoints)) != len(endpoints):
        problem = f"an endpoint twice: {', '.join(endpoints)}"
        raise ConfigError(key, problem, "another for each rank")
    return [*endpoints]


def _load_endpoint(agent: AgentConfig, engine: EngineConfig) -> str | None:
    """Return rank 0's load socket.

    SGLang places the load ports after those of the events, or after those of the replays if they
    would overlap.
    """
    if engine.load != AUTO:
        return engine.load
    host, _, port = engine.zmq.rpartition(":")
    if "," in host or not host.startswith("tcp://") or agent.data_parallel_start_rank:
        allowed = "with zmq tcp://host:port, and all ranks from 0 on; otherwise set the endpoint"
        raise ConfigError("load", f"auto, but zmq is {engine.zmq}", allowed)
    size, base = agent.data_parallel_size, int(port) + agent.data_parallel_size
    replay_port = (engine.replay or "").rpartition(":")[2]
    if replay_port.isdecimal() and abs(base - int(replay_port)) < size:
        base = int(replay_port) + size
    return f"{host}:{base}"


def _numbers(key: str, text: str | list[str], least: int, most: int) -> tuple[int, ...]:
    """Return the numbers in a setting. Raises ConfigError."""
    numbers = []
    for part in listed(text):
        number = number_in(part, most)
        if number is None or number < least:
            raise ConfigError(key, repr(part), f"numbers from {least} to {most}")
        numbers.append(number)
    return tuple(numbers)

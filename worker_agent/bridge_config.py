"""Configuration of an agent beside an engine that keeps its own blocks."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError, InvalidFieldError
from router.protocol.values import Name, Rank
from router.publisher.engine_address import EngineAddress, rank_endpoint
from router.publisher.metrics_dialects import EngineFacts, EngineKind
from worker_agent.common_config import AgentConfig

HttpUrl: TypeAlias = Annotated[str, Meta(pattern="^https?://[^/]+")]
BlockSize: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
Size: TypeAlias = Annotated[int, Meta(ge=1)]

AUTO = "auto"
DEFAULT_EVENTS = "tcp://127.0.0.1:5557"


class BridgeConfig(AgentConfig, frozen=True, kw_only=True):
    """An agent beside an engine. Sizes that are not given are learned from the engine's metrics;
    those that are given have to be the same.
    """

    zmq: Annotated[
        str,
        Meta(
            description=(
                "ZMQ endpoint of the engine's cache events: that of rank 0, to whose "
                "port the rank is added, or one for each rank, separated by commas"
            )
        ),
    ] = DEFAULT_EVENTS
    replay: Annotated[
        str | None,
        Meta(
            description=(
                "ZMQ endpoint where the engine replays events, given likewise; without "
                "it, lost events cannot be recovered"
            )
        ),
    ] = None
    topic: Annotated[str, Meta(description="prefix of the topics to subscribe to")] = ""
    load: Annotated[
        str | None,
        Meta(
            description=(
                "ZMQ endpoint of SGLang's load reports, given likewise; auto: where "
                "SGLang's --load-publish-endpoint auto puts it. By default the load is "
                "read from metrics_url"
            )
        ),
    ] = None
    tiers: Annotated[
        str | None,
        Meta(
            description=(
                "ZMQ endpoint of a block manager in the engine that reports its host, "
                "disk and remote tiers, given likewise; merged with the engine's own "
                "events"
            )
        ),
    ] = None
    events_url: Annotated[
        HttpUrl | None,
        Meta(
            description=(
                "URL to poll for events of a TensorRT-LLM engine that does not stream "
                "them, such as http://127.0.0.1:8000/kv_cache_events; nothing else may "
                "poll it"
            )
        ),
    ] = None
    metrics_url: Annotated[
        HttpUrl | None,
        Meta(
            description=(
                "URL of the engine's Prometheus metrics, such as http://127.0.0.1:8000/metrics"
            )
        ),
    ] = None
    metrics_interval_s: Annotated[
        float, Meta(gt=0, le=2.5, description="interval at which the metrics are read")
    ] = 0.5
    model_name: Annotated[
        Name | None,
        Meta(description="name of the model that is served; by default as the engine calls it"),
    ] = None
    block_size: Annotated[BlockSize | None, Meta(description="tokens in a block")] = None
    total_kv_blocks: Annotated[
        Size | None, Meta(description="blocks in the cache of each rank")
    ] = None
    max_num_batched_tokens: Annotated[
        Size | None,
        Meta(description="tokens in a step of the engine; 2048 if the engine does not say"),
    ] = None
    eagle: Annotated[
        bool, Meta(description="the engine speculates with EAGLE, and hashes pairs of tokens")
    ] = False
    report_mode: Annotated[
        Literal["new", "full"],
        Meta(
            description=(
                "full: the engine may report blocks again that it already holds, when "
                "a client asks it to"
            )
        ),
    ] = "new"
    state_dir: Annotated[
        str | None,
        Meta(
            description=(
                "folder for the state of the engine's event stream, so that a "
                "restarted agent can continue"
            )
        ),
    ] = None

    @property
    def kind(self) -> EngineKind:
        """The engine that it stands beside."""
        assert self.engine != "reference"
        return self.engine

    @property
    def given_facts(self) -> EngineFacts:
        """What was said of the engine."""
        return EngineFacts(
            self.model_name, self.block_size, self.total_kv_blocks, self.max_num_batched_tokens
        )


class RankAddresses(Struct, frozen=True):
    """The sockets of one rank."""

    rank: Rank
    engine: EngineAddress
    load: str | None
    tiers: str | None


def rank_addresses(config: BridgeConfig) -> list[RankAddresses]:
    """Where each rank's sockets are. Raises ConfigError, also where something is missing."""
    _check_sources(config)
    events = _per_rank("zmq", config.zmq, config.ranks)
    replays = _per_rank("replay", config.replay, config.ranks)
    # Only now is the port that `auto` counts from known to be one.
    loads = _per_rank("load", _load_endpoint(config), config.ranks)
    tiers = _per_rank("tiers", config.tiers, config.ranks)
    each = zip(config.ranks, events, replays, loads, tiers, strict=True)
    return [
        RankAddresses(rank, EngineAddress(event, replay, config.topic), load, tier)
        for rank, event, replay, load, tier in each
        if event is not None
    ]


def _check_sources(config: BridgeConfig) -> None:
    if config.endpoint is None:
        raise ConfigError("endpoint", "missing", "the engine's URL for callers, http://host:port")
    if config.load is not None and config.engine != "sglang":
        raise ConfigError("load", f"{config.engine} has no load socket", "with --engine sglang")
    if config.events_url is not None:
        _check_pulled(config)
    if config.metrics_url is None:
        for name in ("block_size", "total_kv_blocks"):
            if getattr(config, name) is None:
                problem = "missing, and there is no metrics_url to learn it from"
                raise ConfigError(name, problem, "either of the two")


def _check_pulled(config: BridgeConfig) -> None:
    if config.engine != "trtllm":
        raise ConfigError("events_url", f"{config.engine} streams its events", "zmq and replay")
    for name, default in (("zmq", DEFAULT_EVENTS), ("replay", None), ("topic", "")):
        if getattr(config, name) != default:
            raise ConfigError(name, "given beside events_url", "either of the two")


def _per_rank(key: str, text: str | None, ranks: Sequence[Rank]) -> list[str | None]:
    """One endpoint for each rank, checked."""
    if text is None:
        return [None for _ in ranks]
    endpoints = [part.strip() for part in text.split(",")]
    try:
        if len(endpoints) == 1:
            return [rank_endpoint(endpoints[0], rank.dp_rank, key) for rank in ranks]
        checked: list[str | None] = [rank_endpoint(endpoint, 0, key) for endpoint in endpoints]
    except InvalidFieldError as error:
        raise ConfigError(key, error.reason, error.allowed) from error
    if len(checked) != len(ranks):
        problem = f"{len(checked)} endpoints for {len(ranks)} ranks"
        raise ConfigError(key, problem, "one for rank 0, or one for each rank")
    if len(set(checked)) != len(checked):
        raise ConfigError(key, f"an endpoint twice: {text}", "another for each rank")
    return checked


def _load_endpoint(config: BridgeConfig) -> str | None:
    """Where rank 0's load socket is. SGLang puts all ranks' behind those of the events, and behind
    those of the replays where they would overlap.
    """
    if config.load != AUTO:
        return config.load
    host, _, port = config.zmq.rpartition(":")
    if "," in host or not host.startswith("tcp://") or config.data_parallel_start_rank:
        allowed = "with zmq tcp://host:port, and all ranks from 0 on; otherwise say where it is"
        raise ConfigError("load", f"auto, but zmq is {config.zmq}", allowed)
    size, base = config.data_parallel_size, int(port) + config.data_parallel_size
    replay_port = (config.replay or "").rpartition(":")[2]
    if replay_port.isdecimal() and abs(base - int(replay_port)) < size:
        base = int(replay_port) + size
    return f"{host}:{base}"

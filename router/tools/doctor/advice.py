"""What to tell whom: the flags of each engine, with the ports that were asked about."""

import msgspec

from router.publisher.metrics_dialects import EngineKind

_NAMES: dict[EngineKind | None, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    None: "the engine",
}
_PORTS = {"endpoint": "5557", "replay_endpoint": "5558"}


def name_of(engine: EngineKind | None) -> str:
    """As its makers write it."""
    return _NAMES[engine]


def events_flag(engine: EngineKind | None, events: str, replay: str, **more: object) -> str:
    """The option that makes an engine publish at these ports, and replay."""
    config: dict[str, object] = {"publisher": "zmq"}
    if engine != "sglang":
        config = {"enable_kv_cache_events": True, **config}
    config["endpoint"] = f"tcp://*:{_port(events, 'endpoint')}"
    config["replay_endpoint"] = f"tcp://*:{_port(replay, 'replay_endpoint')}"
    text = msgspec.json.encode({**config, **more}).decode()
    if engine == "trtllm":
        return f"start TensorRT-LLM with kv_events_config: {text} in its LLM API options"
    return f"start {name_of(engine)} with --kv-events-config '{text}'"


def caching_flag(engine: EngineKind | None) -> str:
    """The option that lets an engine reuse prefixes."""
    if engine == "sglang":
        return "start SGLang without --disable-radix-cache"
    if engine == "trtllm":
        return "start TensorRT-LLM with kv_cache_config: {enable_block_reuse: true}"
    return f"start {name_of(engine)} with --enable-prefix-caching"


def block_size_flag(engine: EngineKind | None, tokens: int) -> str:
    """The option that sets the block size."""
    if engine == "sglang":
        return f"--page-size {tokens}"
    if engine == "trtllm":
        return f"kv_cache_config: {{tokens_per_block: {tokens}}}"
    return f"--block-size {tokens}"


def _port(endpoint: str, role: str) -> str:
    port = endpoint.rpartition(":")[2]
    return port if port.isdecimal() else _PORTS[role]

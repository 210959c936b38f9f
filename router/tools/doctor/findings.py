"""The findings of the doctor, one per check, with advice on each engine's flags."""

import enum
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from router.publisher.engine_metrics.dialects import EngineKind

_NAMES: dict[EngineKind | None, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    None: "the engine",
}
_PORTS = {"endpoint": "5557", "replay_endpoint": "5558"}


def name_of(engine: EngineKind | None) -> str:
    """Return the engine's name in its makers' spelling."""
    return _NAMES[engine]


def events_flag(engine: EngineKind | None, events: str, replay: str, **more: object) -> str:
    """Return the option for an engine to publish and replay events at these ports."""
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
    """Return the option for an engine to reuse prefixes."""
    if engine == "sglang":
        return "start SGLang without --disable-radix-cache"
    if engine == "trtllm":
        return "start TensorRT-LLM with kv_cache_config: {enable_block_reuse: true}"
    return f"start {name_of(engine)} with --enable-prefix-caching"


def block_size_flag(engine: EngineKind | None, tokens: int) -> str:
    """Return the option that sets the block size."""
    if engine == "sglang":
        return f"--page-size {tokens}"
    if engine == "trtllm":
        return f"kv_cache_config: {{tokens_per_block: {tokens}}}"
    return f"--block-size {tokens}"


def _port(endpoint: str, role: str) -> str:
    port = endpoint.rpartition(":")[2]
    return port if port.isdecimal() else _PORTS[role]


class CheckResult(enum.StrEnum):
    """The verdict of a check; `unknown` if no observation decides it."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Finding(Struct, frozen=True, omit_defaults=True):
    """The result of a check and, unless it is good, why that matters and how to fix it."""

    check: str
    verdict: CheckResult
    text: str
    why: str = ""
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, CheckResult.OK, text)


def warning(check: str, text: str, why: str = "", fix: str = "") -> Finding:
    """Return a finding on a part that works, at a cost."""
    return Finding(check, CheckResult.WARNING, text, why, fix)


def wrong(check: str, text: str, why: str, fix: str) -> Finding:
    """Return a finding on a part that does not work."""
    return Finding(check, CheckResult.WRONG, text, why, fix)


def unknown(check: str, text: str, fix: str = "") -> Finding:
    """Return a finding on a part without evidence; `fix` is the way to obtain it."""
    return Finding(check, CheckResult.UNKNOWN, text, "", fix)


def has_wrong(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is wrong."""
    return any(finding.verdict is CheckResult.WRONG for finding in findings)

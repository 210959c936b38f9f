"""A fleet of two vLLM engines, attached by their URLs: no bus, no agents."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from router.errors import ConfigError
from router.tools.up.fleet import LOCALHOST, LocalFleet, fleet_ports, free_port

ENGINES = 2

_QUERY_S = 30.0
_SHARED_MEMORY = 0.9 / ENGINES
"""The fraction of a device's memory for each engine, if they share one."""


def vllm_fleet(
    directory: Path, model: str, arguments: Sequence[str], ports: tuple[int, int]
) -> LocalFleet:
    """Return a fleet of vLLM engines that serve a model, a folder or a name.

    `arguments`: further ones of `vllm serve`. Raises ConfigError.
    """
    name, command, devices = Path(model).name, _vllm(), _devices()
    engines, urls = {}, []
    for number in range(ENGINES):
        port = free_port()
        urls.append(f"http://{LOCALHOST}:{port}")
        engines[f"vllm-{number + 1}"] = [
            *_environment(devices[number::ENGINES]),
            *(command, "serve", model, "--served-model-name", name),
            *("--host", LOCALHOST, "--port", str(port), "--enable-prompt-tokens-details"),
            *("--kv-events-config", _events_config()),
            *(("--gpu-memory-utilization", f"{_SHARED_MEMORY:g}") if len(devices) == 1 else ()),
            *arguments,
        ]
    router = ["--workers", ",".join(urls), *_tokenizer_flags(model, name)]
    return LocalFleet(directory, fleet_ports(*ports), name, router, engines)


def _vllm() -> str:
    """Return vLLM's command, found next to this Python or in PATH. Raises ConfigError."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = shutil.which("vllm", path=places)
    if command is None:
        allowed = "`pip install vllm` beside this Python, or its folder in PATH"
        raise ConfigError("vllm", "the command vllm is not found", allowed)
    return command


def _devices() -> list[str]:
    """Return the CUDA devices that this process may use; none without NVIDIA's driver."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [each.strip() for each in allowed.split(",") if each.strip()]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(  # noqa: S603 - a constant
            query, capture_output=True, text=True, timeout=_QUERY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def _environment(devices: Sequence[str]) -> Sequence[str]:
    """Return the prefix of a command that gives an engine these devices; empty: all of them."""
    return ("env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}") if devices else ()


def _events_config() -> str:
    """Return `--kv-events-config`. vLLM listens only on addresses with a wildcard."""
    sockets = {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
    config = {"enable_kv_cache_events": True, "publisher": "zmq", **sockets}
    return msgspec.json.encode(config).decode()


def _tokenizer_flags(model: str, name: str) -> Sequence[str]:
    """Return the flags of a local tokenizer, if the model is a folder that has one."""
    is_read = find_spec("tokenizers") and find_spec("jinja2")
    if is_read and Path(model, "tokenizer.json").exists():
        return "--tokenizer", f"{name}={model}"
    return ()

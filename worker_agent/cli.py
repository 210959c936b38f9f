"""`kv-worker-agent`: the agent's command line."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from signal import SIGINT
from typing import TypeAlias

from router.errors import ConfigError
from router.runtime.bus.errors import TwinError
from router.runtime.http_server.health import health, started_with
from router.runtime.http_server.server import run_until_signal
from router.runtime.process.logs import log_to_stderr
from router.runtime.process.settings import AGENT_PREFIX
from worker_agent.config.bridge import BridgeConfig
from worker_agent.config.reference import ReferenceConfig, load_agent_config
from worker_agent.operations.command import tiers
from worker_agent.storage.errors import StorageError

USAGE = """\
usage: kv-worker-agent COMMAND [options]

  run     join a fleet on a NATS server, with the reference engine, or publish the
          events and load of an engine that already runs (vllm, sglang, trtllm);
          the options depend on the engine: kv-worker-agent run --engine vllm --help
  tiers   watch the block tiers of a running agent: kv-worker-agent tiers --help
  health  exit with 0 if this container's agent is alive; for its HEALTHCHECK
"""

TWIN_STATUS = 3
WRONG_STATUS = 2
INTERRUPTED_STATUS = 128 + SIGINT

Run: TypeAlias = Callable[[asyncio.Event], Awaitable[None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    It is 2 for a wrong command line or setting, 3 for a taken id, 130 after Ctrl-C before the
    start.
    """
    command, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if command == "health":
        _, *options = rest or started_with("kv-worker-agent") or ["run"]
        return health(options, os.environ, AGENT_PREFIX, 8000)
    if command == "tiers":
        return tiers(rest)
    if command in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if command != "run":
        unknown = f"kv-worker-agent: there is no command {command!r}\n\n" if command else ""
        sys.stderr.write(f"{unknown}{USAGE}")
        return WRONG_STATUS
    status = 0
    try:
        _run(rest)
    except* (ConfigError, StorageError, TwinError) as group:
        error = _innermost(group)
        sys.stderr.write(f"kv-worker-agent: {error}\n")
        status = TWIN_STATUS if isinstance(error, TwinError) else WRONG_STATUS
    except* KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    return status


def _run(arguments: Sequence[str]) -> None:
    config = load_agent_config(arguments, os.environ)
    log_to_stderr(config.logs.log_level, config.logs.log_format)
    run_until_signal(_agent(config))


def _agent(config: ReferenceConfig | BridgeConfig) -> Run:
    """Return the configured agent.

    Only the agent of the reference engine imports torch.
    """
    if isinstance(config, BridgeConfig):
        from worker_agent.bridge.agent import BridgeAgent

        return BridgeAgent(config).run
    try:
        from worker_agent.reference.agent import WorkerAgent
    except ModuleNotFoundError as error:
        problem = f"reference, but {error.name} is not installed"
        allowed = "kv-router[agent], or an engine that already runs: vllm, sglang, trtllm"
        raise ConfigError("engine", problem, allowed) from error
    return WorkerAgent(config).run


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""`kv-worker-agent`: the agent's command line."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from signal import SIGINT
from typing import TypeAlias

from router.block_errors import StorageError
from router.bus_errors import TwinError
from router.errors import ConfigError
from router.process.health import health, started_with
from router.process.logs import log_to_stderr
from router.process.serving import run_until_signal
from router.process.settings import AGENT_PREFIX
from worker_agent.bridge_config import BridgeConfig
from worker_agent.config import ReferenceConfig, load_agent_config
from worker_agent.operations.command import tiers

USAGE = """\
usage: kv-worker-agent COMMAND [options]

  run     join a fleet on a NATS server, with the reference engine or beside an engine
          that already runs (vllm, sglang, trtllm) and whose events and load are passed
          on; the options depend on it: kv-worker-agent run --engine vllm --help
  tiers   watch the block tiers of a running agent: kv-worker-agent tiers --help
  health  exits with 0 if this container's agent is alive; for its HEALTHCHECK
"""

TWIN_STATUS = 3
WRONG_STATUS = 2
INTERRUPTED_STATUS = 128 + SIGINT

Run: TypeAlias = Callable[[asyncio.Event], Awaitable[None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 2 for a wrong command line or setting, 3 for a taken id, 130
    after Ctrl-C before there was anything to stop.
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
    log_to_stderr(config.log_level, config.log_format)
    run_until_signal(_agent(config))


def _agent(config: ReferenceConfig | BridgeConfig) -> Run:
    """The agent that is configured. Only the reference engine needs torch, so that only its agent
    loads it.
    """
    if isinstance(config, BridgeConfig):
        from worker_agent.bridge_agent import BridgeAgent

        return BridgeAgent(config).run
    try:
        from worker_agent.agent import WorkerAgent
    except ModuleNotFoundError as error:
        problem = f"reference, but {error.name} is not installed"
        allowed = "kv-router[agent], or an engine to stand beside: vllm, sglang, trtllm"
        raise ConfigError("engine", problem, allowed) from error
    return WorkerAgent(config).run


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

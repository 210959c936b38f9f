"""`kv-worker-agent`: the agent's command line; each command imports only what it needs."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from signal import SIGINT
from typing import TYPE_CHECKING, TypeAlias

from router.errors import ConfigError
from router.runtime.process.command_line import WRONG_STATUS, Parser
from router.runtime.process.commands import (
    Command,
    Program,
    parser_of,
    run_imported,
    settings_parser_of,
)
from router.runtime.process.loading import as_given, first_pass
from router.runtime.process.logs import log_to_stderr
from router.runtime.process.settings import AGENT_PREFIX

if TYPE_CHECKING:
    from worker_agent.config.bridge import BridgeConfig
    from worker_agent.config.reference import ReferenceConfig

TWIN_STATUS = 3
INTERRUPTED_STATUS = 128 + SIGINT

Run: TypeAlias = Callable[[asyncio.Event], Awaitable[None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    It is 2 for a wrong command line or setting, 3 for a taken id, 130 after Ctrl-C before the
    start.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return PROGRAM.run(words)
    except ConfigError as error:
        text = as_given(error, words, os.environ, AGENT_PREFIX)
        sys.stderr.write(f"kv-worker-agent: {text}\n")
        return WRONG_STATUS


def _run(arguments: Sequence[str]) -> int:
    from router.runtime.bus.errors import TwinError
    from worker_agent.storage.errors import StorageError

    status = 0
    try:
        _serve(arguments)
    except* (ConfigError, StorageError, TwinError) as group:
        error = _innermost(group)
        text = str(error)
        if isinstance(error, ConfigError):
            text = as_given(error, arguments, os.environ, AGENT_PREFIX)
        sys.stderr.write(f"kv-worker-agent: {text}\n")
        status = TWIN_STATUS if isinstance(error, TwinError) else WRONG_STATUS
    except* KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    return status


def _serve(arguments: Sequence[str]) -> None:
    from router.runtime.http_server.server import run_until_signal
    from worker_agent.config.reference import load_agent_config

    config = load_agent_config(arguments, os.environ)
    log_to_stderr(config.logs.log_level, config.logs.log_format)
    run_until_signal(_agent(config))


def _agent(config: "ReferenceConfig | BridgeConfig") -> Run:
    """Return the configured agent.

    Only the agent of the reference engine imports torch.
    """
    from worker_agent.config.bridge import BridgeConfig

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


def _run_parser(arguments: Sequence[str]) -> Parser:
    """Return the parser of `run`: its settings depend on the engine. Raises ConfigError."""
    engine = first_pass("engine", arguments, os.environ, AGENT_PREFIX) or "reference"
    is_reference = engine == "reference"
    place = "reference:ReferenceConfig" if is_reference else "bridge:BridgeConfig"
    name = "kv-worker-agent run"
    return settings_parser_of(name, f"worker_agent.config.{place}", AGENT_PREFIX)(arguments)


def _health(arguments: Sequence[str]) -> int:
    from router.runtime.http_server.health import health, process_of

    _, *options = process_of(arguments, "kv-worker-agent", "run")
    return health(options, os.environ, AGENT_PREFIX, 8000)


def _health_parser(_: Sequence[str]) -> Parser:
    parser = Parser(
        prog="kv-worker-agent health",
        description="Check whether the agent that was started as `kv-worker-agent run options` on "
        "this machine is alive. Exit status: 0 if it is, else 1.",
    )
    text = "run and its options; without it, the first process of this container"
    parser.add_argument("command", nargs="*", metavar="COMMAND", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


PROGRAM = Program(
    "kv-worker-agent",
    "Publishes the events and the load of an engine, and manages blocks in tiers.",
    (
        Command(
            "run",
            "to run it",
            "join a fleet on a NATS server: with the reference engine, or beside --engine vllm, …",
            _run,
            _run_parser,
        ),
        Command(
            "health",
            "to run it",
            "exits with 0 if this container's agent is alive; for its HEALTHCHECK",
            _health,
            _health_parser,
        ),
        Command(
            "tiers",
            "to look inside",
            "watch the block tiers of a running agent",
            run_imported("worker_agent.operations.command:tiers"),
            parser_of("worker_agent.operations.command:tiers_parser"),
        ),
    ),
)

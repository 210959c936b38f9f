"""`kv-worker-agent`: the agent's command line."""

import os
import sys
from collections.abc import Sequence

from router.errors import ConfigError, TwinError
from router.process.serving import log_to_stderr, run_until_signal
from worker_agent.agent import WorkerAgent
from worker_agent.config import load_agent_config

USAGE = """\
usage: kv-worker-agent run [--help] [options]

  run     start a worker with the reference engine against a NATS server
"""

TWIN_STATUS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 2 for a wrong command line or setting, 3 for a taken id."""
    command, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if command != "run":
        sys.stderr.write(USAGE)
        return 0 if command in ("-h", "--help") else 2
    try:
        return _run(rest)
    except ConfigError as error:
        sys.stderr.write(f"kv-worker-agent: {error}\n")
        return 2


def _run(arguments: Sequence[str]) -> int:
    config = load_agent_config(arguments, os.environ)
    log_to_stderr(config.log_level)
    status = 0
    try:
        run_until_signal(WorkerAgent(config).run)
    except* TwinError as group:
        sys.stderr.write(f"kv-worker-agent: {_innermost(group)}\n")
        status = TWIN_STATUS
    return status


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

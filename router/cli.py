"""`kv-router`: one command a process."""

import os
import sys
from collections.abc import Sequence

from router.config import RouterConfig
from router.errors import ConfigError
from router.index_config import load_indexer_config
from router.index_service import IndexService
from router.loading import load_router
from router.local.config import load_up_config
from router.local.up import up
from router.process.logs import log_to_stderr
from router.process.serving import run_until_signal
from router.service import RouterService
from router.tools.doctor.command import doctor
from router.tools.inspection.command import inspect
from router.tools.recordings.record import record
from router.tools.recordings.replay import replay
from router.tools.simulation.command import simulate

USAGE = """\
usage: kv-router COMMAND [--help] [options]

  up       start a whole fleet on this machine, show what it does, and keep serving
  serve    start a router: of a fleet on NATS, of engines registered over HTTP, or of both
  indexer  start the index alone, of the same
  record   start a router that also writes down all it is told and asked
  replay   tell it to another: does it decide the same, or how with other settings
  simulate replay a trace of requests in virtual time: how would other policies have done
  inspect  ask a running router: what does worker 7 hold, who holds this prompt or block
  doctor   connect to an engine, and say what is wrong with it and how to fix it
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. 2 for a wrong command line or setting."""
    command, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    commands = {
        "serve": _serve,
        "up": _up,
        "indexer": _indexer,
        "inspect": inspect,
        "record": record,
        "replay": replay,
        "simulate": simulate,
        "doctor": doctor,
    }
    if command not in commands:
        sys.stderr.write(USAGE)
        return 0 if command in ("-h", "--help") else 2
    try:
        return commands[command](rest)
    except ConfigError as error:
        sys.stderr.write(f"kv-router {command}: {error}\n")
        return 2


def _serve(arguments: Sequence[str]) -> int:
    loaded = load_router(RouterConfig, arguments, os.environ)
    config = loaded.shown()
    log_to_stderr(config.log_level, config.log_format)
    run_until_signal(RouterService(config, sources=loaded.sources).run)
    return 0


def _indexer(arguments: Sequence[str]) -> int:
    config = load_indexer_config(arguments, os.environ)
    log_to_stderr(config.log_level, config.log_format)
    run_until_signal(IndexService(config).run)
    return 0


def _up(arguments: Sequence[str]) -> int:
    config = load_up_config(arguments, os.environ)
    log_to_stderr(config.log_level)
    run_until_signal(lambda stop: up(config, stop))
    return 0

"""`kv-router`: one command a process, which imports what that command needs and no more."""

import os
import sys
from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from router.errors import ConfigError
from router.process.logs import log_to_stderr
from router.process.serving import run_until_signal
from router.process.settings import FORWARD_PREFIX, INDEXER_PREFIX, ROUTER_PREFIX, Loaded

if TYPE_CHECKING:
    from router.process.process_config import ProcessConfig

C = TypeVar("C", bound="ProcessConfig")

USAGE = """\
usage: kv-router COMMAND [--help] [options]

  up       start a whole fleet on this machine, show what it does, and keep serving
  serve    start a router: of a fleet on NATS, of engines registered over HTTP, or of both
  indexer  start the index alone, of the same
  forward  serve OpenAI's interface: send requests where a router says, pass answers on
  record   start a router that also writes down all it is told and asked
  replay   tell it to another: does it decide the same, or how with other settings
  simulate replay a trace of requests in virtual time: how would other policies have done
  inspect  ask a running router: what does worker 7 hold, who holds this prompt or block
  doctor   connect to an engine, and say what is wrong with it and how to fix it
  health   ask the process of this container whether it lives; for its HEALTHCHECK
"""

HEALTH_USAGE = """\
usage: kv-router health [COMMAND [options]]

Ask the process that was started as `kv-router COMMAND options` on this machine whether it lives;
without a command the first process of this container. Exit status: 0 if it does, else 1.
"""

TOOLS = {
    "inspect": "router.tools.inspection.command",
    "record": "router.tools.recordings.record",
    "replay": "router.tools.recordings.replay",
    "simulate": "router.tools.simulation.command",
    "doctor": "router.tools.doctor.command",
}
"""The modules of commands that are functions of the same name."""

Command: TypeAlias = Callable[[Sequence[str]], int]


class _Service(Protocol[C]):
    def reconfigure(self, loaded: Loaded[C]) -> None: ...
    def reread(self) -> list[str]: ...
    async def run(self, stop: Event) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. 2 for a wrong command line or setting."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    command = _command(name)
    if command is None:
        sys.stderr.write(USAGE)
        return 0 if name in ("-h", "--help") else 2
    try:
        return command(rest)
    except ConfigError as error:
        sys.stderr.write(f"kv-router {name}: {error}\n")
        return 2


def _command(name: str) -> Command | None:
    if name in TOOLS:
        tool: Command = getattr(import_module(TOOLS[name]), name)
        return tool
    own = {"serve": _serve, "up": _up, "indexer": _indexer, "forward": _forward}
    return _health if name == "health" else own.get(name)


def _serve(arguments: Sequence[str]) -> int:
    from router.config import RouterConfig
    from router.loading import load_router
    from router.service import RouterService

    return _run(
        lambda: load_router(RouterConfig, arguments, os.environ),
        lambda config, sources: RouterService(config, sources=sources),
    )


def _indexer(arguments: Sequence[str]) -> int:
    from router.index_config import load_indexer
    from router.index_service import IndexService

    return _run(lambda: load_indexer(arguments, os.environ), lambda config, _: IndexService(config))


def _forward(arguments: Sequence[str]) -> int:
    from router.forward.config import load_forward
    from router.forward.service import ForwardService

    return _run(
        lambda: load_forward(arguments, os.environ), lambda config, _: ForwardService(config)
    )


def _run(
    load: Callable[[], Loaded[C]], service_of: Callable[[C, Mapping[str, str]], _Service[C]]
) -> int:
    """Run a process until it is told to end; on SIGHUP its configuration is read again."""
    from router.process.reload import Reloader

    loaded = load()
    config = loaded.shown()
    log_to_stderr(config.log_level, config.log_format)
    service = service_of(config, loaded.sources)
    run_until_signal(service.run, Reloader(loaded, load, service.reconfigure, service.reread))
    return 0


def _health(arguments: Sequence[str]) -> int:
    """Of `arguments`, which are a command and its options; without any, of those of process 1."""
    from router.process.health import health, started_with

    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(HEALTH_USAGE)
        return 0
    command, *options = list(arguments) or started_with("kv-router") or ["serve"]
    if command == "indexer":
        return health(options, os.environ, INDEXER_PREFIX, 8090)
    if command == "forward":
        return health(options, os.environ, FORWARD_PREFIX, 8000)
    return health(options, os.environ, ROUTER_PREFIX, 8092)


def _up(arguments: Sequence[str]) -> int:
    from router.local.config import load_up_config
    from router.local.up import up

    config = load_up_config(arguments, os.environ)
    log_to_stderr(config.log_level)
    run_until_signal(lambda stop: up(config, stop))
    return 0

"""`kv-router`: one command a process, which imports what that command needs and no more."""

import os
import sys
from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from signal import SIGINT
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from router.errors import ConfigError
from router.process.logs import log_to_stderr
from router.process.serving import run_until_signal
from router.process.settings import FORWARD_PREFIX, INDEXER_PREFIX, ROUTER_PREFIX, Loaded

if TYPE_CHECKING:
    from router.process.process_config import ProcessConfig

C = TypeVar("C", bound="ProcessConfig")

USAGE = """\
usage: kv-router COMMAND [options]        kv-router COMMAND --help

Sends each LLM request to the worker that already holds its prefix.

to try it
  up        start a bus, a router and three workers on this machine, and show what they do
to run it
  serve     the router: for a fleet on NATS, for engines registered over HTTP, or both
  forward   an OpenAI endpoint: asks a router where each request goes, and passes the answer on
  indexer   only the index of who holds which blocks
  health    exits with 0 if this container's process is alive; for its HEALTHCHECK
to look inside
  inspect   ask a running router what a worker holds, or who holds a prompt or a block
  doctor    check an engine's event sockets, and explain what is wrong and how to fix it
  record    a router that also writes everything it is told and asked to a file
  replay    run a recording again: the same decisions, or what other settings would change
  simulate  run a trace or a recording in virtual time, under several policies
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

INTERRUPTED_STATUS = 128 + SIGINT

Command: TypeAlias = Callable[[Sequence[str]], int]


class _Service(Protocol[C]):
    def reconfigure(self, loaded: Loaded[C]) -> None: ...
    def reread(self) -> list[str]: ...
    async def run(self, stop: Event) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 2 for a wrong command line or setting, 130 after Ctrl-C
    before there was anything to stop.
    """
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    command = _command(name)
    if command is None:
        return _without_command(name)
    try:
        return command(rest)
    except ConfigError as error:
        sys.stderr.write(f"kv-router {name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def _without_command(name: str) -> int:
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"kv-router {version('kv-router')}\n")
        return 0
    near = get_close_matches(name, [*TOOLS, *_OWN, "health"], n=1)
    unknown = f"kv-router: there is no command {name!r}" if name else ""
    hint = f"; did you mean {near[0]}?" if near else ""
    sys.stderr.write(f"{unknown}{hint}\n\n{USAGE}" if unknown else USAGE)
    return 2


def _command(name: str) -> Command | None:
    if name in TOOLS:
        tool: Command = getattr(import_module(TOOLS[name]), name)
        return tool
    return _health if name == "health" else _OWN.get(name)


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
    from router.local.errors import FleetNotReadyError
    from router.local.up import up

    config = load_up_config(arguments, os.environ)
    log_to_stderr(config.log_level)
    try:
        run_until_signal(lambda stop: up(config, stop))
    except FleetNotReadyError as error:
        sys.stderr.write(f"kv-router up: {error}\n")
        return 1
    return 0


_OWN: Mapping[str, Command] = {
    "serve": _serve,
    "up": _up,
    "indexer": _indexer,
    "forward": _forward,
}

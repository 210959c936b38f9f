"""The `kv-router` command line; each command imports only the modules that it needs."""

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
from router.runtime.process.loading import Loaded
from router.runtime.process.logs import log_to_stderr, printable
from router.runtime.process.settings import FORWARD_PREFIX, INDEXER_PREFIX, ROUTER_PREFIX

if TYPE_CHECKING:
    from router.config.indexer import IndexerConfig
    from router.config.router import RouterConfig
    from router.forward.config import ForwardConfig

    _Config = RouterConfig | IndexerConfig | ForwardConfig

C = TypeVar("C", bound="_Config")

USAGE = """\
usage: kv-router COMMAND [options]        kv-router COMMAND --help

Sends each LLM request to the worker that already holds its prefix.

to try it
  up        start a bus, a router and three workers on this machine, and show what they do
to run it
  serve     the router: for a fleet on NATS, for engines registered over HTTP, or both
  forward   an OpenAI endpoint: a router selects the worker of each request; streams the response
  epp       an endpoint picker for gateways (Envoy's ext_proc), such as those of InferencePools
  indexer   only the index of the blocks that each rank holds
  health    exits with 0 if this container's process is alive; for its HEALTHCHECK
to look inside
  inspect   query a running router: the blocks of a worker, the holders of a prompt or a block
  attach    let a running router attach the engine at a URL
  doctor    check an engine's event sockets, and explain what is wrong and how to fix it
  record    a router that also writes all its inputs to a file
  replay    run a recording again: the same decisions, or what other settings would change
  simulate  run a trace or a recording in virtual time, under several policies
  conformance  score what a router, this one or another, believes of its engines' caches
"""

HEALTH_USAGE = """\
usage: kv-router health [COMMAND [options]]

Check whether the process that was started as `kv-router COMMAND options` on this machine is alive;
without a command, the first process of this container. Exit status: 0 if it is alive, else 1.
"""

TOOLS = {
    "inspect": "router.tools.inspect.command",
    "record": "router.tools.recordings.record",
    "replay": "router.tools.recordings.replay",
    "simulate": "router.tools.simulate.command",
    "attach": "router.tools.attach.command",
    "doctor": "router.tools.doctor.command",
    "conformance": "router.tools.conformance.command",
}
"""The modules of commands that are functions of the same name."""

INTERRUPTED_STATUS = 128 + SIGINT

Command: TypeAlias = Callable[[Sequence[str]], int]


class _Service(Protocol[C]):
    def reconfigure(self, loaded: Loaded[C]) -> None: ...
    def reread(self) -> list[str]: ...
    async def run(self, stop: Event) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 2 for a wrong command line or setting, and 130 after Ctrl-C before the process has
    started.
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
    from router.config.load import load_router

    def service(config: "RouterConfig", sources: Mapping[str, str]) -> _Service["RouterConfig"]:
        from router.service.router import RouterService

        show = _show if sys.stdout.isatty() and sys.stderr.isatty() else None
        return RouterService(config, sources=sources, show=show)

    return _run(lambda: load_router(arguments, os.environ), service)


def _show(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def _indexer(arguments: Sequence[str]) -> int:
    from router.config.indexer import load_indexer

    def service(config: "IndexerConfig", _: object) -> _Service["IndexerConfig"]:
        from router.service.indexer import IndexService

        return IndexService(config)

    return _run(lambda: load_indexer(arguments, os.environ), service)


def _forward(arguments: Sequence[str]) -> int:
    from router.forward.config import load_forward

    return _run(lambda: load_forward(arguments, os.environ), _forward_service)


def _epp(arguments: Sequence[str]) -> int:
    from router.forward.config import EppConfig, load_forward

    return _run(lambda: load_forward(arguments, os.environ, EppConfig), _forward_service)


def _forward_service(config: "ForwardConfig", _: object) -> _Service["ForwardConfig"]:
    from router.forward.service import ForwardService

    return ForwardService(config)


def _run(
    load: Callable[[], Loaded[C]], service_of: Callable[[C, Mapping[str, str]], _Service[C]]
) -> int:
    """Run a process until it is stopped; SIGHUP reads its configuration again.

    `service_of` imports the service, which help and a configuration that is only shown do not need.
    """
    loaded = load()
    config = loaded.shown()
    from router.runtime.http_server.server import run_until_signal
    from router.runtime.process.reload import ConfigReloader

    log_to_stderr(config.logs.log_level, config.logs.log_format)
    service = service_of(config, loaded.sources)
    run_until_signal(service.run, ConfigReloader(loaded, load, service.reconfigure, service.reread))
    return 0


def _health(arguments: Sequence[str]) -> int:
    """Check the process started with `arguments`, a command and its options.

    Without any it checks process 1 of the container.
    """
    from router.runtime.http_server.health import health, started_with

    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(HEALTH_USAGE)
        return 0
    command, *options = list(arguments) or started_with("kv-router") or ["serve"]
    if command == "indexer":
        return health(options, os.environ, INDEXER_PREFIX, 8090)
    if command in ("forward", "epp"):
        port = 8000 if command == "forward" else 9090
        return health(options, os.environ, FORWARD_PREFIX, port)
    return health(options, os.environ, ROUTER_PREFIX, 8092)


def _up(arguments: Sequence[str]) -> int:
    from router.tools.up.config import load_up_config

    config = load_up_config(arguments, os.environ)
    from router.runtime.http_server.server import run_until_signal
    from router.tools.up.fleet import FleetNotReadyError
    from router.tools.up.up import up

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
    "epp": _epp,
}

"""The `kv-router` command line; each command imports only the modules that it needs."""

import gc
import os
import sys
from asyncio import Event
from collections.abc import Callable, Mapping, Sequence
from signal import SIGINT
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

from router.errors import ConfigError
from router.runtime.process.command_line import WRONG_STATUS, Parser
from router.runtime.process.commands import (
    Command,
    Program,
    imported,
    parser_of,
    run_imported,
    settings_parser_of,
)
from router.runtime.process.loading import Loaded, as_given
from router.runtime.process.logs import log_to_stderr, printable
from router.runtime.process.settings import (
    DOCTOR_PREFIX,
    FORWARD_PREFIX,
    INDEXER_PREFIX,
    ROUTER_PREFIX,
    UP_PREFIX,
)

if TYPE_CHECKING:
    from router.config.indexer import IndexerConfig
    from router.config.router import RouterConfig
    from router.forward.config import ForwardConfig
    from router.runtime.process.reload import Outcome

    _Config = RouterConfig | IndexerConfig | ForwardConfig

C = TypeVar("C", bound="_Config")

_PREFIXES = MappingProxyType(
    {
        "up": UP_PREFIX,
        "serve": ROUTER_PREFIX,
        "record": ROUTER_PREFIX,
        "forward": FORWARD_PREFIX,
        "epp": FORWARD_PREFIX,
        "indexer": INDEXER_PREFIX,
        "doctor": DOCTOR_PREFIX,
    }
)

INTERRUPTED_STATUS = 128 + SIGINT


class _Service(Protocol[C]):
    def reconfigure(self, loaded: Loaded[C]) -> None: ...
    def reloaded(self, outcome: "Outcome") -> list[str]: ...
    async def run(self, stop: Event) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 2 for a wrong command line or setting, and 130 after Ctrl-C before the process has
    started.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return PROGRAM.run(words)
    except ConfigError as error:
        variables = os.environ if words[0] in _PREFIXES else {}
        text = as_given(error, words, variables, _PREFIXES.get(words[0], ""))
        sys.stderr.write(f"kv-router {words[0]}: {text}\n")
        return WRONG_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


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

    `service_of` imports the service, which a configuration that is only shown does not need.
    """
    loaded = load()
    config = loaded.shown()
    from router.runtime.http_server.server import run_until_signal
    from router.runtime.process.reload import ConfigReloader

    gc.disable()  # a quarter of the time to load the service; run_until_signal enables it
    log_to_stderr(config.logs.log_level, config.logs.log_format)
    service = service_of(config, loaded.sources)
    reload = ConfigReloader(loaded, load, service.reconfigure, service.reloaded)
    run_until_signal(service.run, reload)
    return 0


def _health(arguments: Sequence[str]) -> int:
    """Check the process started with `arguments`, a command and its options.

    Without any it checks process 1 of the container.
    """
    from router.runtime.http_server.health import health, process_of

    command, *options = process_of(arguments, "kv-router", "serve")
    if command == "indexer":
        return health(options, os.environ, INDEXER_PREFIX, 8090)
    if command in ("forward", "epp"):
        port = 8000 if command == "forward" else 9090
        return health(options, os.environ, FORWARD_PREFIX, port)
    return health(options, os.environ, ROUTER_PREFIX, 8092)


def _health_parser(_: Sequence[str]) -> Parser:
    parser = Parser(
        prog="kv-router health",
        description="Check whether the process that was started as `kv-router COMMAND options` on "
        "this machine is alive. Exit status: 0 if it is, else 1.",
    )
    text = "the command with its options; without one, the first process of this container"
    parser.add_argument("command", nargs="*", metavar="COMMAND", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


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


_OPERATE = "to operate a running router"


def _operation(name: str, summary: str) -> Command:
    """Return a command that operates a running router."""
    place = "router.tools.operate.command"

    def run(arguments: Sequence[str]) -> int:
        return int(imported(f"{place}:operate")(name, arguments))

    def make(_: Sequence[str]) -> Parser:
        parser: Parser = imported(f"{place}:parser")(name)
        return parser

    return Command(name, _OPERATE, summary, run, make)


_TRY, _RUN, _LOOK = "to try it", "to run it", "to look inside"

PROGRAM = Program(
    "kv-router",
    "Sends each LLM request to the worker that already holds its prefix.",
    (
        Command(
            "up",
            _TRY,
            "start a bus, a router and three workers on this machine, and show what they do",
            _up,
            settings_parser_of("kv-router up", "router.tools.up.config:UpConfig", UP_PREFIX),
        ),
        Command(
            "serve",
            _RUN,
            "the router: for a fleet on NATS, for engines registered over HTTP, or both",
            _serve,
            settings_parser_of(
                "kv-router serve", "router.config.router:RouterConfig", ROUTER_PREFIX
            ),
        ),
        Command(
            "forward",
            _RUN,
            "an OpenAI endpoint: a router selects the worker of each request",
            _forward,
            settings_parser_of(
                "kv-router forward", "router.forward.config:ForwardConfig", FORWARD_PREFIX
            ),
        ),
        Command(
            "epp",
            _RUN,
            "an endpoint picker for gateways (Envoy's ext_proc), such as those of InferencePools",
            _epp,
            settings_parser_of("kv-router epp", "router.forward.config:EppConfig", FORWARD_PREFIX),
        ),
        Command(
            "indexer",
            _RUN,
            "only the index of the blocks that each rank holds",
            _indexer,
            settings_parser_of(
                "kv-router indexer", "router.config.indexer:IndexerConfig", INDEXER_PREFIX
            ),
        ),
        Command(
            "health",
            _RUN,
            "exits with 0 if this container's process is alive; for its HEALTHCHECK",
            _health,
            _health_parser,
        ),
        _operation("workers", "its workers, or one in detail"),
        Command(
            "attach",
            _OPERATE,
            "let it attach the engine at a URL",
            run_imported("router.tools.attach.command:attach"),
            parser_of("router.tools.inspect.arguments:attach_parser"),
        ),
        _operation("register", "register a worker by the JSON of POST /workers"),
        _operation("unregister", "remove a registered worker"),
        _operation("cordon", "send a worker no new requests"),
        _operation("uncordon", "let a worker serve again"),
        _operation("drain", "cordon a worker, and wait for its requests to end"),
        _operation("config", "its settings in force, and where each comes from"),
        _operation("top", "the load of its workers, again and again, the worst first"),
        Command(
            "inspect",
            _LOOK,
            "the blocks of a worker, the holders of a prompt or a block, a recording's contents",
            run_imported("router.tools.inspect.command:inspect"),
            parser_of("router.tools.inspect.arguments:inspect_parser"),
        ),
        Command(
            "doctor",
            _LOOK,
            "check an engine's event sockets, and explain what is wrong and how to fix it",
            run_imported("router.tools.doctor.command:doctor"),
            settings_parser_of(
                "kv-router doctor", "router.tools.doctor.config:DoctorConfig", DOCTOR_PREFIX
            ),
        ),
        Command(
            "record",
            _LOOK,
            "a router that also writes all its inputs to a file",
            run_imported("router.tools.recordings.record:record"),
            settings_parser_of(
                "kv-router record", "router.tools.recordings.arguments:RecordConfig", ROUTER_PREFIX
            ),
        ),
        Command(
            "replay",
            _LOOK,
            "run a recording again: the same decisions, or what other settings would change",
            run_imported("router.tools.recordings.replay:replay"),
            parser_of("router.tools.recordings.arguments:replay_parser"),
        ),
        Command(
            "simulate",
            _LOOK,
            "run a trace or a recording in virtual time, under several policies",
            run_imported("router.tools.simulate.command:simulate"),
            settings_parser_of(
                "kv-router simulate", "router.tools.simulate.config:SimulateConfig", "", "trace"
            ),
        ),
        Command(
            "conformance",
            _LOOK,
            "score what a router, this one or another, believes of its engines' caches",
            run_imported("router.tools.conformance.command:conformance"),
            parser_of("router.tools.conformance.arguments:conformance_parser"),
        ),
    ),
)

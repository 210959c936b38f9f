"""Commands that operate a running router: thin clients of its HTTP API.

    workers, register, unregister, cordon, uncordon, drain, config ─▶ one response, as text or JSON
    top                                                            ─▶ a table, again and again

Exit status: 0; 1 if there is no router, it refuses, or a worker is not drained in time; 2 for a
wrong command line.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec
from msgspec import Struct

from router.errors import InvalidFieldError, KvRouterError, ServerError
from router.protocol.catalogue import Lifecycle
from router.protocol.workers import WorkerView
from router.runtime.process.command_line import Parser, allowed_names, number_within
from router.runtime.process.settings import as_toml
from router.tools.inspect.arguments import add_router, natural
from router.tools.inspect.report import worker_report, workers_report
from router.tools.inspect.router_client import InspectClient, client_of
from router.tools.operate.top import add_top, watch

_POLL_S = 0.2
_MAX_WAIT_S = 86_400


class Result(Struct, frozen=True):
    """The result of a command: for programs, for people, and the exit status."""

    value: object
    text: str
    status: int = 0


Act: TypeAlias = Callable[[InspectClient, Namespace], Result]


class Operation(Struct, frozen=True):
    """A command: a sentence about it, how its arguments are added, and what it does."""

    summary: str
    add: Callable[[Parser], object]
    act: Act


def parser(name: str) -> Parser:
    """Return the parser of an operation, or of `top`."""
    described = "Show the load of all workers, the worst first." if name == "top" else ""
    made = Parser(
        prog=f"kv-router {name}", description=described or OPERATIONS[name].summary, add_help=True
    )
    add_router(made)
    made.add_argument("--json", action="store_true", help="print the router's response as JSON")
    (add_top if name == "top" else OPERATIONS[name].add)(made)
    return made


def operate(name: str, arguments: Sequence[str]) -> int:
    """Run an operation, print its result, and return the exit status."""
    asked = parser(name).parse_args(arguments)
    try:
        client = client_of(asked)
        try:
            if name == "top":
                return watch(client, asked)
            result = OPERATIONS[name].act(client, asked)
        finally:
            client.close()
    except KvRouterError as error:
        sys.stderr.write(f"kv-router {name}: {error}\n")
        return 1 if isinstance(error, ServerError) else 2
    shown = _json(result.value) if asked.json else result.text
    sys.stdout.write(shown.rstrip("\n") + "\n")
    return result.status


def _add_workers(parser: Parser) -> None:
    text = "id of one worker, to show in detail; by default all"
    parser.add_argument("worker_id", nargs="?", type=natural, metavar="ID", help=text)


def _workers(client: InspectClient, asked: Namespace) -> Result:
    if asked.worker_id is None:
        workers = client.workers()
        return Result(workers, workers_report(workers))
    worker = client.worker(asked.worker_id)
    return Result(worker, worker_report(worker, worker.ranks))


def _add_register(parser: Parser) -> None:
    text = (
        "JSON object as POST /workers takes it, a file with it, or - for standard input; an engine "
        "with an OpenAI server needs only its URL: kv-router attach URL"
    )
    parser.add_argument("worker", metavar="WORKER", help=text)


def _register(client: InspectClient, asked: Namespace) -> Result:
    return _state(client.register(_registration(asked.worker)))


def _registration(text: str) -> bytes:
    """Return the body of a registration. Raises InvalidFieldError."""
    if text.lstrip().startswith("{"):
        return text.encode()
    if text == "-":
        return sys.stdin.read().encode()
    try:
        return Path(text).read_bytes()
    except OSError as error:
        allowed = "a JSON object, a readable file with one, or -"
        raise InvalidFieldError("WORKER", f"{text}: {error.strerror}", allowed) from error


def _add_id(parser: Parser) -> None:
    parser.add_argument("worker_id", type=natural, metavar="ID", help="id of the worker")


def _unregister(client: InspectClient, asked: Namespace) -> Result:
    worker = client.unregister(asked.worker_id)
    return Result(worker, f"worker {worker.worker_id} is removed")


def _set(lifecycle: Lifecycle, client: InspectClient, asked: Namespace) -> Result:
    return _state(client.set_lifecycle(asked.worker_id, lifecycle))


def _add_drain(parser: Parser) -> None:
    _add_id(parser)
    text = "wait for its requests to end, at most this long (default: 0, do not wait)"
    parser.add_argument(
        "--wait-s",
        type=number_within(0, _MAX_WAIT_S, "seconds"),
        default=0.0,
        metavar="SECONDS",
        help=text,
    )


def _drain(client: InspectClient, asked: Namespace) -> Result:
    worker = client.set_lifecycle(asked.worker_id, "draining")
    end_s = time.monotonic() + asked.wait_s
    while worker.lifecycle != "drained" and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        worker = client.worker(asked.worker_id)
    is_late = asked.wait_s > 0 and worker.lifecycle != "drained"
    running = sum(rank.active_requests for rank in worker.ranks)
    text = f"worker {worker.worker_id} is {worker.lifecycle}: {running} requests in flight"
    return Result(worker, text, int(is_late))


def _state(worker: WorkerView) -> Result:
    given = [worker.attachment, *worker.not_schedulable_reasons]
    reasons = "; ".join(each for each in given if each)
    text = f"worker {worker.worker_id} is {worker.lifecycle}{reasons and ': '}{reasons}"
    return Result(worker, text)


def _add_config(parser: Parser) -> None:
    text = "name of one setting, such as max_wait_s; by default all"
    parser.add_argument("setting", nargs="?", metavar="SETTING", help=text)
    changed = "show only settings that differ from the default"
    parser.add_argument("--changed", action="store_true", help=changed)


def _config(client: InspectClient, asked: Namespace) -> Result:
    views = client.config()
    if asked.setting is not None:
        name = asked.setting.removeprefix("--").replace("-", "_")
        if name not in views:
            allowed = allowed_names(name, views).replace("--help-all", "kv-router config")
            raise InvalidFieldError("SETTING", f"{asked.setting!r} is unknown", allowed)
        views = {name: views[name]}
    if asked.changed:
        views = {name: view for name, view in views.items() if view.source != "default"}
    return Result(views, as_toml(views))


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "workers": Operation("Show the workers that a router knows.", _add_workers, _workers),
        "register": Operation(
            "Register a worker at a router, or replace its registration.", _add_register, _register
        ),
        "unregister": Operation("Remove a registered worker.", _add_id, _unregister),
        "cordon": Operation("Send a worker no new requests.", _add_id, partial(_set, "cordoned")),
        "uncordon": Operation(
            "Let a cordoned or draining worker serve again.", _add_id, partial(_set, "schedulable")
        ),
        "drain": Operation(
            "Send a worker no new requests, and wait for its requests to end.", _add_drain, _drain
        ),
        "config": Operation(
            "Show the settings of a router in force, and where each comes from.",
            _add_config,
            _config,
        ),
    }
)
"""The operations by name."""

"""`kv-worker-agent tiers`: periodic status of the tiers of a running agent.

Exit status: 0; 1 if the agent is unavailable or responds with an error; 2 for a wrong command line.
"""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from router.errors import ConfigError, KvRouterError
from router.protocol.subjects import Subjects
from router.runtime.process.command_line import Parser, add_access, as_url, number_within
from router.runtime.process.settings import id_of_name
from router.runtime.security.http_access import HttpAccess
from worker_agent.operations.client import Ask, over_http, over_nats
from worker_agent.operations.messages import StatusReply
from worker_agent.operations.table import tier_table

DEFAULT_URL = "http://127.0.0.1:8000"
_CLEAR = "\x1b[H\x1b[2J"


def tiers(arguments: Sequence[str]) -> int:
    """Print the status until interrupted. Returns the exit status."""
    asked = _parse(arguments)
    try:
        asyncio.run(_watch(asked))
    except KeyboardInterrupt:
        return 0
    except KvRouterError as error:
        sys.stderr.write(f"kv-worker-agent tiers: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _watch(asked: Namespace) -> None:
    clock = asyncio.get_running_loop().time
    before: StatusReply | None = None
    before_s = 0.0
    async with _agent(asked) as ask:
        while True:
            now, now_s = await ask(), clock()
            sys.stdout.write(_shown(asked, now, before, now_s - before_s))
            sys.stdout.flush()
            if asked.once:
                return
            before, before_s = now, now_s
            await asyncio.sleep(asked.interval_s)


def _agent(asked: Namespace) -> AbstractAsyncContextManager[Ask]:
    access = HttpAccess(asked.token_file, asked.ca_file, asked.cert_file, asked.key_file)
    if asked.nats is None:
        return over_http(asked.url, access)
    worker_id = asked.worker_id if asked.worker_id is not None else id_of_name(asked.name)
    return over_nats(asked.nats, Subjects(asked.namespace), worker_id, access)


def _shown(asked: Namespace, now: StatusReply, before: StatusReply | None, passed_s: float) -> str:
    if asked.json:
        return msgspec.json.encode(now).decode() + "\n"
    is_screen = sys.stdout.isatty() and not asked.once
    return (_CLEAR if is_screen else "") + tier_table(now, before, passed_s) + "\n"


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = tiers_parser()
    asked = parser.parse_args(arguments)
    _check(parser, asked)
    return asked


def tiers_parser() -> Parser:
    """Return the parser of `kv-worker-agent tiers`."""
    parser = Parser(
        prog="kv-worker-agent tiers",
        description="Show usage and traffic of the block tiers of a running agent.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=as_url,
        metavar="URL",
        help="URL of the agent, with or without http:// (default: %(default)s)",
    )
    where.add_argument(
        "--nats", metavar="URL", help="NATS server of the fleet, to use in place of HTTP"
    )
    parser.add_argument(
        "--namespace", default="default", metavar="NAME", help="fleet (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-id",
        type=int,
        metavar="ID",
        help="id of the worker, with --nats; or give its --name",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the worker, with --nats")
    parser.add_argument(
        "--interval-s",
        "--interval",
        type=number_within(0.05, 3600, "seconds"),
        default=1.0,
        metavar="SECONDS",
        help="time between updates (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print once, and exit")
    parser.add_argument(
        "--json", action="store_true", help="print the agent's responses as JSON lines"
    )
    add_access(parser, "agent")
    return parser


def _check(parser: Parser, asked: Namespace) -> None:
    """Exit with status 2 if an argument is invalid."""
    if asked.nats is not None and asked.worker_id is None and asked.name is None:
        parser.error("--nats: no worker is named (allowed: with --worker-id, or --name)")
    try:
        Subjects(asked.namespace)
    except ValueError as error:
        parser.error(f"--namespace: {error}")

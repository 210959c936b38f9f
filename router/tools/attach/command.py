"""`kv-router attach`: lets a running router attach an engine, and prints what it learned.

Exit status: 0 if the engine can be chosen, 1 if it cannot yet, or the router refuses it; 2 for a
wrong command line.
"""

import argparse
import sys
from collections.abc import Sequence

from router.core.views.workers import WorkerView
from router.errors import ServerError
from router.runtime.security.http_access import HttpAccess
from router.tools.inspect.arguments import add_router
from router.tools.inspect.router_client import InspectClient


def attach(arguments: Sequence[str]) -> int:
    """Attach an engine, print one sentence about it, and return the exit status."""
    asked = _parse(arguments)
    access = HttpAccess(asked.token_file, asked.ca_file, asked.cert_file, asked.key_file)
    client = InspectClient(asked.router_url, access)
    try:
        worker = client.attach(asked.engine)
    except ServerError as error:
        sys.stderr.write(f"kv-router attach: {error}\n")
        return 1
    finally:
        client.close()
    sys.stdout.write(_report(worker))
    return int(worker.lifecycle != "schedulable")


def _report(worker: WorkerView) -> str:
    return f"{worker.attachment}\nworker {worker.worker_id} is {worker.lifecycle}\n"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kv-router attach",
        description="Let a running router attach an engine, which is asked for all it needs.",
    )
    parser.add_argument(
        "engine",
        metavar="ENGINE",
        help="URL of the engine's OpenAI server, with ;events=tcp://HOST:PORT if it does not name "
        "its event sockets itself",
    )
    add_router(parser, "--router-url")
    return parser.parse_args(arguments)

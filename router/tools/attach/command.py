"""`kv-router attach`: lets a running router attach an engine, and prints what it learned.

Exit status: 0 if the engine can be chosen, 1 if it cannot yet, or the router refuses it; 2 for a
wrong command line.
"""

import sys
from collections.abc import Sequence

import msgspec

from router.errors import ServerError
from router.protocol.workers import WorkerView
from router.runtime.process.command_line import as_url
from router.tools.inspect.arguments import attach_parser
from router.tools.inspect.router_client import client_of


def attach(arguments: Sequence[str]) -> int:
    """Attach an engine, print one sentence about it, and return the exit status."""
    asked = attach_parser().parse_args(arguments)
    client = client_of(asked)
    try:
        engine = as_url(asked.engine) if ":" in asked.engine else asked.engine
        worker = client.register(msgspec.json.encode({"endpoint": engine}))
    except ServerError as error:
        sys.stderr.write(f"kv-router attach: {error}\n")
        return 1
    finally:
        client.close()
    as_json = msgspec.json.format(msgspec.json.encode(worker), indent=2).decode() + "\n"
    sys.stdout.write(as_json if asked.json else _report(worker))
    return int(worker.lifecycle != "schedulable")


def _report(worker: WorkerView) -> str:
    return f"{worker.attachment}\nworker {worker.worker_id} is {worker.lifecycle}\n"

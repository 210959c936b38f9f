"""Choosing over HTTP: our service and the peer's, one core each, the same requests.

    python benchmarks/service.py [--quick] [--json] [--only json,binary,alone,ingest] [--soak 600]

Both are real processes on the same core, asked in turn by one generator on another: `kv-router
serve`, and `python -m dynamo.select_service` of PyPI's `ai-dynamo-runtime`. Engines' sockets tell
both the same 280,000 blocks of 16 workers. `--soak` instead holds ours at 80 % of its most for so
many seconds, and looks at its memory.
"""

import os
import sys
from functools import partial

from command_line import section_parser
from report import Section, report
from rows import machine
from service_cycle_rows import client_rows, cycle_rows, httpx_rows, nats_rows
from service_features import feature_rows
from service_rows import (
    Servers,
    ServiceScale,
    alone_rows,
    binary_rows,
    ingest_rows,
    json_rows,
    soaked,
)

MEASURE = {
    "cycle": cycle_rows,
    "client": client_rows,
    "httpx": httpx_rows,
    "features": feature_rows,
    "nats": nats_rows,
    "json": json_rows,
    "binary": binary_rows,
    "alone": alone_rows,
    "ingest": ingest_rows,
}

SECTIONS = {
    "cycle": "a booking, its first token and its end, by raw sockets",
    "client": "the same as our client asks, beside the peer's three calls",
    "httpx": "the same by an ordinary user of httpx",
    "features": "a cycle with more to it, beside the plain one: processor time",
    "nats": "the cycle over NATS, beside the same router over HTTP",
    "json": "requests a second, bodies in JSON",
    "binary": "requests a second, ours with packed tokens, the peer's in JSON",
    "alone": "99th percentile of requests one after the other",
    "ingest": "99th percentile at half the most, while 200,000 blocks a second come, and go",
}


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    scale = ServiceScale(arguments.quick)
    head = [f"{machine()}, load {os.getloadavg()[0]:.1f} before", str(scale)]
    with Servers() as servers:
        if arguments.soak is not None:
            return soaked(servers, arguments.soak)
        chosen = {
            name: Section(SECTIONS[name], partial(MEASURE[name], servers, scale))
            for name in arguments.only
        }
        return report(chosen, "peer", head, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

"""Booking and choosing over HTTP: our service and the peer's, one core each, the same requests.

    python benchmarks/service.py [--quick] [--json] [--only cycle,client,…] [--write] [--soak 600]

Both are real processes on the same core, asked in turn by one generator on another: `kv-router
serve`, and `python -m dynamo.select_service` of PyPI's `ai-dynamo-runtime`. Engines' sockets tell
both the same 280,000 blocks of 16 workers. `--write` keeps the rows, in
`results/service-cycle.json`. `--soak` instead holds ours at 80 % of its most for these seconds,
and looks at its memory.
"""

import sys
from collections.abc import Callable
from functools import partial

from command_line import section_parser
from conformance.environments import base_python
from report import Benchmark, Section, report, version_of
from rows import Row
from service_features import feature_rows
from service_limits import fleet_rows, ingest_rows, overload_rows, query_rows, soaked
from service_rows import (
    Servers,
    ServiceScale,
    alone_rows,
    binary_rows,
    client_rows,
    cycle_rows,
    httpx_rows,
    json_rows,
    nats_rows,
)

SECTIONS: dict[str, tuple[str, Callable[[Servers, ServiceScale], list[Row]]]] = {
    "cycle": ("a booking, its first token and its end, by raw sockets", cycle_rows),
    "client": ("the same as our client asks, beside the peer's three calls", client_rows),
    "httpx": ("the same by an ordinary user of httpx", httpx_rows),
    "features": ("a cycle with more to it, beside the plain one: processor time", feature_rows),
    "nats": ("the cycle over NATS, beside the same router over HTTP", nats_rows),
    "queries": ("explained bookings, /overlap_scores, /ready", query_rows),
    "ingest": ("cycles at half the most, while 200,000 blocks a second come, and go", ingest_rows),
    "fleet": ("cycles with 1,024 workers, beside 16", fleet_rows),
    "overload": ("cycles asked for at 1.5 times the most", overload_rows),
    "json": ("/select alone: requests a second, bodies in JSON", json_rows),
    "binary": ("/select alone: ours with packed tokens, the peer's in JSON", binary_rows),
    "alone": ("/select alone: requests one after the other", alone_rows),
}
QUICK = ("cycle", "client", "httpx", "json")
"""Those that end within 45 s together; each of the others starts services of its own or is long."""


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.set_defaults(only=None)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    scale = ServiceScale(arguments.quick)
    with Servers() as servers:
        if arguments.soak is not None:
            return soaked(servers, arguments.soak)
        chosen = {
            name: Section(SECTIONS[name][0], partial(SECTIONS[name][1], servers, scale))
            for name in arguments.only or (QUICK if arguments.quick else SECTIONS)
        }
        facts = {"interpreter of both": version_of(base_python())}
        return report(chosen, Benchmark("service-cycle", "peer", str(scale), facts), arguments)


if __name__ == "__main__":
    sys.exit(main())

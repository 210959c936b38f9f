"""Direct mode against its goals: engines' sockets into the index of a router without a bus.

    python benchmarks/direct.py [--quick] [--json] [--only ingest,peer,fleet]

The router is the real process, `kv-router serve`, pinned to one core; workers are registered over
HTTP, and engines are real sockets in other processes.
"""

import sys
from functools import partial

from command_line import section_parser
from direct_fleet import fleet_rows
from direct_ingest import ingest_rows, peer_rows
from direct_router import running_router
from direct_scale import DirectScale
from report import Benchmark, Section, report

SECTIONS = {
    "ingest": ("engine socket to index, one core, against decoding alone", ingest_rows),
    "peer": ("the same engine's bytes to the index of Dynamo's selection service", peer_rows),
    "fleet": ("engines registered at once, then idle, beside the goals", fleet_rows),
}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = DirectScale(arguments.quick)
    with running_router() as router:
        chosen = {
            name: Section(title, partial(measure, router, scale))
            for name, (title, measure) in SECTIONS.items()
            if name in arguments.only
        }
        return report(chosen, Benchmark("direct", "alternative", str(scale)), arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The event plane against its goals: from agents over the bus into the index, and after faults.

    python benchmarks/events.py [--quick] [--json] [--only ingest,visible,…]

Real nats-server, real processes: the router's side is pinned to one core, the bus to another, and
agents run anywhere. Most figures have a bound of their own; beside them stands a plain alternative
or, where there is none, the bound itself. Each module says which.
"""

import logging
import sys
from functools import partial

from command_line import section_parser
from events_ingest import ingest_rows
from events_late_join import late_join_rows
from events_recovery import recovery_rows
from events_scale import EventScale
from events_visible import visible_rows
from events_zmq import zmq_rows
from report import Benchmark, Section, report

SECTIONS = {
    "ingest": ("JetStream to index, one core, against an ordered consumer", ingest_rows),
    "visible": ("stored to visible, 100 k blocks a second, against the flush window", visible_rows),
    "late_join": ("a late router, against the object store's reader", late_join_rows),
    "recovery": ("after a fault of the bus, beside the goal", recovery_rows),
    "zmq": ("engine socket to index, one core, against decoding alone", zmq_rows),
}


def main() -> int:
    logging.basicConfig(level=logging.ERROR)
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = EventScale(arguments.quick)
    chosen = {
        name: Section(title, partial(measure, scale))
        for name, (title, measure) in SECTIONS.items()
        if name in arguments.only
    }
    return report(chosen, Benchmark("events", "alternative", str(scale)), arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Forwarding: what it adds, beside two proxies of PyPI, before the same trivial engine.

    python benchmarks/forward.py [--quick] [--json] [--only latency,stream,idle]

All are real processes on one core, asked in turn by one generator on another, where the engine is,
too. Ours are two: `kv-router forward`, and the router that it asks, which reads every token; the
peers are told to take turns among engines, and decide nothing.
"""

import os
import sys
from functools import partial

from command_line import section_parser
from forward_rows import Scale, idle, latency, stream
from report import Section, report
from rows import machine

SECTIONS = {
    "latency": "added to a request of 1,000 tokens, p50, one at a time",
    "stream": "64 streams, 50 chunks a second each; beside it what is allowed",
    "idle": "resident memory; beside it what is allowed",
}
MEASURE = {"latency": latency, "stream": stream, "idle": idle}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    head = [f"{machine()}, load {os.getloadavg()[0]:.1f} before"]
    chosen = {
        name: Section(SECTIONS[name], partial(MEASURE[name], scale)) for name in arguments.only
    }
    return report(chosen, "beside it", head, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

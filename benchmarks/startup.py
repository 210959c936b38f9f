"""What starting and resting costs: until `/health` answers, memory, bytes of an installation.

    python benchmarks/startup.py [--quick] [--json] [--only first,time,memory,size] [--write]

Real processes, started one after the other, kernels compiled before, except for `first`, which
takes minutes, and which `--quick` leaves out unless it is named. Beside `kv-router serve` stands
`python -m dynamo.select_service` of PyPI's `ai-dynamo-runtime`; goals are ours alone.
"""

import sys
from functools import partial

from command_line import section_parser
from report import Benchmark, Section, report
from startup_rows import MEASURE, StartupScale

SECTIONS = {
    "first": "the first `serve` of a machine, which has the kernels compiled",
    "time": "from the command until `/health` answers 200",
    "memory": "resident, at rest, 3 s after that",
    "size": "bytes of a package with all that it requires, no extras",
}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = StartupScale(arguments.quick)
    names = arguments.only
    if arguments.quick and names == list(SECTIONS):
        names.remove("first")
    chosen = {name: Section(SECTIONS[name], partial(MEASURE[name], scale)) for name in names}
    return report(chosen, Benchmark("startup", "peer", str(scale)), arguments)


if __name__ == "__main__":
    sys.exit(main())

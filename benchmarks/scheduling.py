"""The policy `predictive` beside all others, replayed on a trace in virtual time.

python benchmarks/scheduling.py TRACE [--quick] [--json] [--only …] [--seeds 5] [--jobs 2] [--write]

TRACE is a file in Mooncake's format. Every replay is of 16 workers of the 70 B preset, events and
reports 50 ms late, rates learned from a cold start. Figures are means over the seeds, which decide
every random choice and make the made-up workloads; a policy that is compared "as it comes or tuned"
is the best of a grid. `--journal FILE` goes on where a run with the same code was cut short.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from command_line import section_parser
from msgspec import to_builtins
from rows import Row, as_json, as_table, machine
from scheduling_runs import Case, append_to_journal, read_journal, run_all
from scheduling_sections import SECTIONS, SPEEDS, Found, Plan

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    arguments = parser().parse_args()
    plan = Plan(arguments.trace, arguments.seeds, SPEEDS, None)
    if arguments.quick:
        plan = Plan(arguments.trace, 1, (2.2,), 1_500)
    cases = {name: list(SECTIONS[name].cases(plan)) for name in arguments.only}
    found = replayed([case for each in cases.values() for case in each], arguments)
    rows = {name: list(SECTIONS[name].rows(plan, found)) for name in arguments.only}
    for name in arguments.only if arguments.write else ():
        write(name, rows[name], {case: found[case] for case in cases[name]})
    every = [row for each in rows.values() for row in each]
    print(as_json(every) if arguments.json else f"{machine()}\n{as_table(every, 'other')}")
    return 0 if all(row.holds for row in every) else 1


def parser() -> argparse.ArgumentParser:
    made = section_parser(__doc__, SECTIONS)
    made.add_argument("trace", help="a file in Mooncake's format")
    made.add_argument("--seeds", type=int, default=5, help="of each replay that is compared")
    made.add_argument("--jobs", type=int, default=2, help="processes")
    made.add_argument("--journal", type=Path, help="what is over, a line a replay")
    made.add_argument("--write", action="store_true", help=f"into {RESULTS.name}/ as well")
    return made


def replayed(cases: Sequence[Case], arguments: argparse.Namespace) -> Found:
    """Every case, from the journal or anew."""
    found = read_journal(arguments.journal) if arguments.journal else {}
    for case, summary in run_all((each for each in cases if each not in found), arguments.jobs):
        found[case] = summary
        if arguments.journal:
            append_to_journal(arguments.journal, case, summary)
    return found


def write(section: str, rows: Sequence[Row], found: Found) -> None:
    """Rows for people, and every replay for programs. Traces are named without their folders."""
    replays = [
        {**to_builtins(case), "source": Path(case.source).name, **to_builtins(summary)}
        for case, summary in found.items()
    ]
    file = RESULTS / f"scheduling-{section}"
    file.with_suffix(".json").write_text(json.dumps(replays, indent=1) + "\n")
    file.with_suffix(".txt").write_text(f"{machine()}\n{as_table(rows, 'other')}\n")


if __name__ == "__main__":
    sys.exit(main())

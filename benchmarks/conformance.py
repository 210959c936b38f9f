"""Engine event streams, played over real sockets to KV-aware routers, and what they make of them.

python benchmarks/conformance.py [--quick] [--json] [--only …] [--system …] [--write]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from conformance.corpus import SCENARIOS
from conformance.player import Patience, play
from conformance.steps import Scenario
from conformance.systems import SYSTEMS
from conformance.table import FAIRNESS, LEGEND, WRONG, Table, mark
from rows import machine

RESULTS = Path(__file__).with_name("results")
FULL, QUICK = Patience(settle_s=1.5, limit_s=8.0), Patience(settle_s=1.0, limit_s=2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less patience; at most 45 s")
    parser.add_argument("--json", action="store_true", help="rows, cells and totals as JSON")
    parser.add_argument(
        "--only", default="", help="scenarios or groups with any of these words, comma-separated"
    )
    parser.add_argument(
        "--system", default=",".join(SYSTEMS), help="which systems, comma-separated"
    )
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}/ as well")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    table, unavailable = measure(
        chosen(arguments.only), arguments.system.split(","), QUICK if arguments.quick else FULL
    )
    head = f"{machine()}; load {os.getloadavg()[0]:.1f}; {time.monotonic() - started_s:.0f} s"
    page = as_page(table, unavailable, head)
    data = json.dumps({"unavailable": unavailable, **table.as_builtins()}, indent=1)
    if arguments.write:
        (RESULTS / "conformance.md").write_text(page)
        (RESULTS / "conformance.json").write_text(data + "\n")
    print(data if arguments.json else page)
    return 1 if any(is_failure(table, i) for i in range(len(table.rows))) else 0


def chosen(words: str) -> tuple[Scenario, ...]:
    """Scenarios whose name or group has one of the words; all if there are none."""
    wanted = [word.strip() for word in words.split(",")]
    return tuple(s for s in SCENARIOS if any(word in f"{s.group}: {s.name}" for word in wanted))


def measure(
    scenarios: tuple[Scenario, ...], names: list[str], patience: Patience
) -> tuple[Table, dict[str, str]]:
    """The table, and systems that could not be had."""
    kinds = {name: SYSTEMS[name] for name in names}
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        rows, unavailable = asyncio.run(play(scenarios, kinds, Path(directory), patience))
    titles = {name: kind.title for name, kind in kinds.items() if name not in unavailable}
    return Table(scenarios, titles, tuple(rows)), unavailable


def as_page(table: Table, unavailable: dict[str, str], head: str) -> str:
    """The table with all that has to be said about it."""
    missing = [f"Not here: {SYSTEMS[name].title}: {reason}" for name, reason in unavailable.items()]
    said = "\n".join(f"- {line}" for line in (*FAIRNESS, *table.notes()))
    problems = [f"Not answered: {problem}" for problem in table.problems()]
    parts = [f"# Conformance\n\n{head}", *missing, table.summary(), LEGEND, table.markdown()]
    parts += [*problems, said]
    return "\n\n".join(parts) + "\n"


def is_failure(table: Table, i: int) -> bool:
    """We are wrong without a word."""
    cell = table.rows[i].get("ours")
    return cell is not None and mark(cell) == WRONG and not table.scenarios[i].convention


if __name__ == "__main__":
    sys.exit(main())

"""Sections of a benchmark, measured, printed and kept in `results`."""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from rows import Row, as_json, as_table, machine
from timing import margin

RESULTS = Path(__file__).resolve().parent / "results"


class Section(Struct, frozen=True):
    """Rows that belong together."""

    title: str
    measure: Callable[[], list[Row]]


class Benchmark(Struct, frozen=True):
    """A benchmark as it is run. `name`: of its file in `results`; `scale`: what is measured.

    `peer`: the heading of the column beside ours; `more_facts`: what else a reader has to know.
    """

    name: str
    peer: str
    scale: str
    more_facts: Mapping[str, str] = {}

    def facts(self) -> dict[str, object]:
        """Return machine, commit, date and load as of now."""
        is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
        return {
            "machine": machine(),
            **self.more_facts,
            "scheduler": "usual" if is_usual else "real time: other work is kept off",
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "scale": self.scale,
            "load before": round(os.getloadavg()[0], 2),
        }


def report(
    sections: Mapping[str, Section], benchmark: Benchmark, arguments: argparse.Namespace
) -> int:
    """Measure sections, print them and keep them if `--write` is given.

    Returns 0 if every row meets its goal.
    """
    facts, measured = benchmark.facts(), {}
    if not arguments.json:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    for name, section in sections.items():
        rows = section.measure()
        if rows:
            measured[name] = rows
            if not arguments.json:
                table = as_table(rows, benchmark.peer)
                print(f"\n{name}: {section.title}\n{table}", flush=True)
    every = [row for rows in measured.values() for row in rows]
    names = [name for name, rows in measured.items() for _ in rows]
    print(as_json(every, names) if arguments.json else _worst(measured))
    if arguments.write:
        keep(benchmark.name, facts, measured)
    return 0 if all(row.holds for row in every) else 1


def _worst(measured: Mapping[str, list[Row]]) -> str:
    lines = ["\nthe worst cell of each, and how many times over it meets its goal"]
    for name, rows in measured.items():
        worst = min(rows, key=margin)
        lines.append(f"{name:<10}{worst.name:<26}{margin(worst):>6.2f}")
    return "\n".join(lines)


def keep(name: str, facts: Mapping[str, object], found: Mapping[str, Sequence[Row]]) -> None:
    """Write sections to `results`, each with its facts. Sections that were not measured stay."""
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    after = {"load after": round(os.getloadavg()[0], 2)}
    for section, rows in found.items():
        measured = json.loads(as_json(rows, [section] * len(rows)))
        kept[section] = {**facts, **after, "rows": measured}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def version_of(python: str) -> str:
    """Return the version of an interpreter, and its path."""
    shown = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    return f"{shown.stdout.strip()}, {python}"


def commit() -> str:
    """Return the commit that is measured, with + if code was changed since."""
    head, changed = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", *_CODE)
    return f"{head or 'unknown'}{'+' if changed else ''}"


_CODE = ("--", ":/", ":!/benchmarks/results", ":!/docs", ":!/*.md")
"""All but results, and what is made from them."""


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    shown = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return shown.stdout.strip()

"""Sections of a benchmark, measured, printed and kept."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from rows import Row, as_json, as_table
from timing import margin


class Section(Struct, frozen=True):
    """Rows that belong together."""

    title: str
    measure: Callable[[], list[Row]]


def report(sections: Mapping[str, Section], peer: str, head: Sequence[str], as_rows: bool) -> int:
    """Measure sections and print them below the head; 0 if every row meets its goal."""
    if not as_rows:
        print("\n".join(head))
    measured = {}
    for name, section in sections.items():
        rows = section.measure()
        if rows:
            measured[name] = rows
            if not as_rows:
                print(f"\n{name}: {section.title}\n{as_table(rows, peer)}", flush=True)
    every = [row for rows in measured.values() for row in rows]
    names = [name for name, rows in measured.items() for _ in rows]
    print(as_json(every, names) if as_rows else _worst(measured))
    return 0 if all(row.holds for row in every) else 1


def _worst(measured: Mapping[str, list[Row]]) -> str:
    lines = ["\nthe worst cell of each, and how many times over it meets its goal"]
    for name, rows in measured.items():
        worst = min(rows, key=margin)
        lines.append(f"{name:<10}{worst.name:<26}{margin(worst):>6.2f}")
    return "\n".join(lines)


def keep(results: Path, facts: Mapping[str, object], found: Mapping[str, Sequence[Row]]) -> None:
    """Write the rows of these sections, with where they were measured; those of others stay."""
    kept = json.loads(results.read_text()) if results.exists() else {}
    for section, rows in found.items():
        measured = json.loads(as_json(rows, [section] * len(rows)))
        kept[section] = {**facts, "rows": measured}
    results.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def version_of(python: str) -> str:
    """An interpreter, and its version."""
    shown = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    return f"{shown.stdout.strip()}, {python}"


def commit() -> str:
    """The commit that is measured; + if files were changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    here = Path(__file__).resolve().parent
    told = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"

"""Sections of the comparison with the peer, measured and printed."""

import os
from collections.abc import Callable, Mapping

from growth import growth_rows
from index_find import cold_rows, hashing_rows, uneven_rows, warm_rows
from index_ingest import mixed_rows, removed_rows, stored_rows
from index_memory import memory_rows
from index_restore import restore_rows
from rows import Row, as_json, as_table, machine
from timing import Scale, margin

MEASURE: dict[str, Callable[[Scale], list[Row]]] = {
    "find": warm_rows,
    "cold": cold_rows,
    "uneven": uneven_rows,
    "store": stored_rows,
    "remove": removed_rows,
    "memory": memory_rows,
    "restore": restore_rows,
    "mixed": mixed_rows,
    "hashing": hashing_rows,
    "growth": growth_rows,
}


def report(sections: Mapping[str, str], *, quick: bool, as_rows: bool) -> int:
    """Measure these sections (title by name) and print them; 0 if every cell meets its goal."""
    scale = Scale(quick)
    if not as_rows:
        busy = f"load {os.getloadavg()[0]:.1f} before"
        print(f"{machine()}, pinned to one core, {busy}\n{scale}")
    measured = {}
    for name, title in sections.items():
        rows = MEASURE[name](scale)
        if rows:
            measured[name] = rows
            if not as_rows:
                print(f"\n{name}: {title}\n{as_table(rows, 'peer')}", flush=True)
    every = [row for rows in measured.values() for row in rows]
    print(as_json(every) if as_rows else _worst(measured))
    return 0 if all(row.holds for row in every) else 1


def _worst(measured: Mapping[str, list[Row]]) -> str:
    lines = ["\nthe worst cell of each, and how many times over it meets its goal"]
    for name, rows in measured.items():
        worst = min(rows, key=margin)
        lines.append(f"{name:<10}{worst.name:<26}{margin(worst):>6.2f}")
    return "\n".join(lines)

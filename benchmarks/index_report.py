"""Sections of the comparison with the peer."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial

from growth import growth_rows
from index_find import cold_rows, hashing_rows, uneven_rows, warm_rows
from index_hybrid import hybrid_rows
from index_ingest import mixed_rows, removed_rows, stored_rows
from index_memory import memory_rows
from index_restore import restore_rows
from report import Benchmark, Section, report
from rows import Row
from timing import Scale

MEASURE: dict[str, Callable[[Scale], list[Row]]] = {
    "find": warm_rows,
    "cold": cold_rows,
    "hybrid": hybrid_rows,
    "uneven": uneven_rows,
    "store": stored_rows,
    "remove": removed_rows,
    "memory": memory_rows,
    "restore": restore_rows,
    "mixed": mixed_rows,
    "hashing": hashing_rows,
    "growth": growth_rows,
}


def measured(titles: Mapping[str, str], arguments: Namespace) -> int:
    """Measure sections (title by name) and print them; 0 if every cell meets its goal."""
    scale = Scale(arguments.quick)
    chosen = {name: Section(title, partial(MEASURE[name], scale)) for name, title in titles.items()}
    return report(chosen, Benchmark("index", "peer", f"{scale}, on one core"), arguments)

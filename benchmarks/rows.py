"""Rows of ours against a peer, as every benchmark prints them, and the machine they are from."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from msgspec import Struct, to_builtins


class Row(Struct, frozen=True):
    """One figure. `goal` bounds the ratio, or where `is_bounded` ours: at least, or where `lower`
    at most.

    `error`: half the width of the ratio's 95 % confidence interval, all of which has to hold.
    `note`: what else to know of it.
    """

    name: str
    ours: float
    peer: float
    unit: str
    goal: float
    lower: bool
    error: float = 0.0
    note: str = ""

    is_bounded: ClassVar[bool] = False

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    @property
    def holds(self) -> bool:
        if self.lower:
            return self.ratio + self.error <= self.goal
        return self.ratio - self.error >= self.goal


def as_json(rows: Sequence[Row], sections: Sequence[str] = ()) -> str:
    """`{name, ours, peer, unit, ratio, goal, bounded, lower, holds, error}` each, and its section
    and note, where there are some.
    """
    fields = ("name", "ours", "peer", "unit", "goal", "lower", "error")
    shown = [
        {**{f: to_builtins(row)[f] for f in fields}, "ratio": row.ratio, "holds": row.holds}
        | {"bounded": row.is_bounded}
        | ({"note": row.note} if row.note else {})
        for row in rows
    ]
    for each, section in zip(shown, sections, strict=False):
        each["section"] = section
    return json.dumps(shown, indent=1)


def as_table(rows: Sequence[Row], peer: str) -> str:
    """Return the rows as a table for people."""
    width = max([24, *(len(row.name) + 1 for row in rows)])
    lines = [f"{'':<{width}}{'ours':>12}{peer:>14}  {'unit':<8}{'ratio':>7}         goal"]
    lines += [
        f"{row.name:<{width}}{row.ours:>12.1f}{row.peer:>14.1f}  {row.unit:<8}{row.ratio:>7.3f}"
        f"{f' ± {row.error:.3f}' if row.error else '':<8}  "
        f"{'at most' if row.lower else 'at least'} {row.goal:g}: {'yes' if row.holds else 'NO'}"
        f"{f'  {row.note}' if row.note else ''}"
        for row in rows
    ]
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores, memory, Python."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    processor = names[0] if names else platform.processor()
    return (
        f"{os.cpu_count()} × {processor}, {memory_gb:.0f} GB, "
        f"Python {platform.python_version()}, {platform.system()}"
    )

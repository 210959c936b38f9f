"""The score table: a row for every scenario, a column for every system, totals below."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from msgspec import Struct, to_builtins

from .score import Cell
from .steps import Scenario

RIGHT, SAID, WRONG = "✓", "◐", "✗"
LEGEND = (
    f"{RIGHT} every count right; doubted: but not vouched for · "
    f"{SAID} wrong, and said not to be certain (in its own words) · "
    f"{WRONG} wrong without a word · ghosts: blocks counted that the engine does not hold · "
    "missing: blocks that it holds and that are not counted · in brackets: a matter of convention, "
    "not scored"
)
FAIRNESS = (
    "The truth is an exact model of the engine, which also sees what never arrives. No router can "
    "know what was lost without a replay: there, saying so is the best there is.",
    "All systems hear the same bytes from the same sockets, and are asked until they are right and "
    "certain, or the patience is over. «Restart» closes the engine's sockets and opens "
    "them again at once.",
    "Dynamo is scored as its standalone selection service, which is told its engines over HTTP. In "
    "its runtime the loss of a worker's lease removes the worker, which hides restarts that take "
    "longer than the lease. After a kill −9 it is told its workers again, as an orchestrator does.",
    "Dynamo reads SGLang's `cache_salt`; it does not read vLLM's salt, which is in `extra_keys`. A "
    "caller that hashes blocks itself can avoid that.",
    "Who cannot read a batch credits nothing for it, which is right where the truth is 0: the rows "
    "«asked with it» tell that from understanding.",
    "vllm-router has no API for overlaps: its own log says what it credits to the worker it chose, "
    "and all its tier credits are set to 1. It is asked with both `model` and `lora_name`.",
    "vllm-router and kv-router forget all of an engine after a gap that they cannot fill: they "
    "miss what it still has, and have no ghosts.",
    "kv-router is told with `report_mode: full` which engines announce blocks again; nobody else "
    "can be told, and sets of blocks are right there by nature.",
)


class Score(Struct, frozen=True):
    """A system over many scenarios. `certain`: right, and no word of doubt."""

    right: int = 0
    certain: int = 0
    said: int = 0
    wrong: int = 0
    ghosts: int = 0
    missing: int = 0


class Table(Struct, frozen=True):
    """Results as they are shown. `rows`: cells by system name, one for every scenario."""

    scenarios: tuple[Scenario, ...]
    titles: Mapping[str, str]
    rows: tuple[Mapping[str, Cell], ...]

    def scored(self, name: str, group: str | None = None) -> Score:
        """In one group, or all in all; what is a matter of convention does not count."""
        cells = [
            row[name] for each, row in zip(self.scenarios, self.rows, strict=True)
            if not each.convention and group in (None, each.group)
        ]  # fmt: skip
        marks = [mark(cell) for cell in cells]
        return Score(
            right=marks.count(RIGHT),
            certain=sum(cell.is_certain for cell in cells),
            said=marks.count(SAID),
            wrong=marks.count(WRONG),
            ghosts=sum(cell.ghosts for cell in cells),
            missing=sum(cell.missing for cell in cells),
        )

    def summary(self) -> str:
        """Right ones by group, and the totals."""
        counts: Counter[str] = Counter(s.group for s in self.scenarios if not s.convention)
        lines = [
            _line(f"{group}, of {count}", *[str(self.scored(n, group).right) for n in self.titles])
            for group, count in counts.items()
        ]
        return "\n".join([*self._head("right in"), *lines, *self._totals()])

    def _head(self, corner: str) -> list[str]:
        return [_line(corner, *self.titles.values()), _line(*["---"] * (len(self.titles) + 1))]

    def markdown(self) -> str:
        """For people."""
        lines = self._head("scenario")
        pairs = zip(self.scenarios, self.rows, strict=True)
        for group, members in groupby(pairs, key=lambda pair: pair[0].group):
            lines.append(_line(f"**{group}**", *[""] * len(self.titles)))
            for scenario, row in members:
                lines.append(_line(scenario.name, *[_shown(scenario, row[n]) for n in self.titles]))
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        scores = [self.scored(name) for name in self.titles]
        count = sum(not scenario.convention for scenario in self.scenarios)
        return [
            _line(f"**right, of {count}**", *[f"**{score.right}**" for score in scores]),
            _line("… and vouched for", *[str(score.certain) for score in scores]),
            _line("wrong, and said so", *[str(score.said) for score in scores]),
            _line("**wrong without a word**", *[f"**{score.wrong}**" for score in scores]),
            _line("ghosts, blocks", *[str(score.ghosts) for score in scores]),
            _line("missing, blocks", *[str(score.missing) for score in scores]),
        ]

    def notes(self) -> list[str]:
        """What scenarios have to say of themselves."""
        return [
            f"{scenario.name}: {scenario.convention or scenario.note}"
            for scenario in self.scenarios
            if scenario.convention or scenario.note
        ]

    def problems(self) -> list[str]:
        """Questions that were not answered, and why."""
        return [
            f"{self.titles[name]}: {scenario.name}: {cell.problem}"
            for scenario, row in zip(self.scenarios, self.rows, strict=True)
            for name, cell in row.items()
            if name in self.titles and cell.problem
        ]

    def as_builtins(self) -> dict[str, Any]:
        """For programs: rows as every benchmark here prints them, and every answer."""
        return {
            "rows": [row for name in self.titles if name != "ours" for row in self._beside(name)],
            "cells": [
                {
                    "scenario": scenario.name,
                    "group": scenario.group,
                    "convention": scenario.convention,
                    "systems": {name: _detailed(cell) for name, cell in row.items()},
                }
                for scenario, row in zip(self.scenarios, self.rows, strict=True)
            ],
            "totals": {name: to_builtins(self.scored(name)) for name in self.titles},
        }

    def _beside(self, name: str) -> list[dict[str, Any]]:
        """Blocks counted wrongly by us and by a peer; silence is what must not happen to us."""
        if "ours" not in self.titles:
            return []
        return [
            {
                "name": f"{scenario.name} / {name}",
                "ours": (ours := row["ours"].ghosts + row["ours"].missing),
                "peer": (peer := row[name].ghosts + row[name].missing),
                "unit": "blocks wrong",
                "ratio": ours / peer if peer else None,
                "goal": 0,
                "holds": bool(scenario.convention) or mark(row["ours"]) != WRONG,
            }
            for scenario, row in zip(self.scenarios, self.rows, strict=True)
        ]


def mark(cell: Cell) -> str:
    """Right, wrong, or wrong with a warning."""
    if cell.is_right:
        return RIGHT
    return SAID if cell.said else WRONG


def _shown(scenario: Scenario, cell: Cell) -> str:
    if scenario.convention:
        counts = [q.compared.counts for q in cell.questions]
        return f"({', '.join(_counted(c) for each in counts for c in each)})"
    if cell.problem:
        return f"{WRONG} no answer"
    if cell.is_right:
        return RIGHT if cell.is_certain else f"{RIGHT} doubted"
    numbers = [(cell.ghosts, "ghosts"), (cell.missing, "missing")]
    off = ", ".join(f"{number} {word}" for number, word in numbers if number)
    return " ".join(filter(None, (mark(cell), off, cell.said and f"({cell.said})")))


def _counted(blocks: int | None) -> str:
    return "–" if blocks is None else str(blocks)


def _detailed(cell: Cell) -> dict[str, Any]:
    return {
        "mark": mark(cell),
        "certain": cell.is_certain,
        "ghosts": cell.ghosts,
        "missing": cell.missing,
        "said": cell.said,
        "problem": cell.problem,
        "answers": [
            {"truth": question.truth, "counts": question.compared.counts}
            for question in cell.questions
        ],
    }


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

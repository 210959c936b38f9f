"""The score table: a row for every cause and every scenario, a column for every system."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, to_builtins

from router.tools.conformance.score import Cell, Mark, Score, joint_mark, scored
from router.tools.conformance.steps import Scenario

NOT_SCORED = "–"
LEGEND = (
    f"{Mark.RIGHT.value} every count right · {Mark.SAID.value} wrong, and an answer or the log "
    f"says that it may be · {Mark.WRONG.value} wrong without a word · doubted: right, but an "
    "answer says that it may not be · warned: right, but the log warns about that engine · "
    "ghosts: blocks counted that the engine does not hold · missing: blocks that it holds and that "
    "are not counted · in brackets: not scored · –: the system's design rules it out"
)
METHOD = (
    "The truth is an exact model of the engine, which also follows what never arrives. In captured "
    "streams the engine's own count of reused tokens has to agree with it.",
    "A cause is a behaviour, however many scenarios try it. It is right if all of them are. Rows "
    "that no router can know, or that only an agreement decides, are shown and not scored.",
    "All systems are subscribed to the same stream, and asked until they are right and certain, or "
    "the patience is over. A restart closes the engine's sockets and opens them again at once.",
    "Salts and image hashes have the form in which each system's own front end hands them to the "
    "engine, for the engine publishes them as it received them.",
    "A warning or an error in a system's log counts as its word about every later answer for that "
    "engine. A line that names no engine counts for the scenario that acted last.",
    "A system that cannot read a batch credits nothing for it, which is right where the truth is "
    "0: the rows «asked with it» distinguish that from understanding.",
)


class Table(Struct, frozen=True):
    """Results as they are shown.

    `titles`: of the systems, by name. `rows`: cells by system name, one for every scenario; a
    system without a cell in a row is not scored in it.
    """

    scenarios: tuple[Scenario, ...]
    titles: Mapping[str, str]
    rows: tuple[Mapping[str, Cell], ...]

    def causes(self, name: str) -> dict[str, list[Cell]]:
        """Return the cells of a system by root cause, scored ones alone."""
        cells: dict[str, list[Cell]] = {}
        for scenario, row in self._pairs():
            if scenario.is_scored and name in row:
                cells.setdefault(scenario.root_cause, []).append(row[name])
        return cells

    def by_cause(self, name: str) -> Score:
        """Return the score of a system, where each cause counts once."""
        return scored(self.causes(name).values())

    def by_row(self, name: str) -> Score:
        """Return the score of a system, where each scenario counts once."""
        return scored([row[name]] for s, row in self._pairs() if s.is_scored and name in row)

    def unknowable(self, name: str) -> Score:
        """Return the results in the scenarios that no router can know."""
        return scored([row[name]] for s, row in self._pairs() if s.unknowable and name in row)

    def is_silently_wrong(self, name: str) -> bool:
        """Return whether a system is wrong without a word in a row that is no convention."""
        return any(
            row[name].mark is Mark.WRONG
            for scenario, row in self._pairs()
            if not scenario.convention and name in row
        )

    def totals(self) -> str:
        """Return the totals as Markdown."""
        names = list(self.titles)
        causes = [self.by_cause(name) for name in names]
        rows = [self.by_row(name) for name in names]
        unknown = [self.unknowable(name) for name in names]
        lines = [
            _line("**right**", *[f"**{s.right} of {s.count}**" for s in causes]),
            _line("… doubted by an answer: false alarms", *[str(s.doubted) for s in causes]),
            _line("… with a warning in the log", *[str(s.warned) for s in causes]),
            _line("wrong, and an answer or the log says so", *[str(s.said) for s in causes]),
            _line("**wrong without a word**", *[f"**{s.wrong}**" for s in causes]),
            _line("wrong with ghosts", *[str(s.with_ghosts) for s in causes]),
            _line("rows right", *[f"{s.right} of {s.count}" for s in rows]),
            _line(
                "rows that cannot be known: wrong without a word",
                *[f"{s.wrong} of {s.count}" for s in unknown],
            ),
        ]
        return "\n".join([*self._head("by root cause"), *lines])

    def cause_lines(self) -> str:
        """Return a row for every cause as Markdown."""
        by_system = {name: self.causes(name) for name in self.titles}
        counts = Counter(s.root_cause for s in self.scenarios if s.is_scored)
        lines = [
            _line(
                f"{cause} ({count})" if count > 1 else cause,
                *[_joint(by_system[name].get(cause, ())) for name in self.titles],
            )
            for cause, count in counts.items()
        ]
        return "\n".join([*self._head("cause (rows)"), *lines])

    def row_lines(self) -> str:
        """Return a row for every scenario as Markdown."""
        lines = self._head("scenario")
        for group, members in groupby(self._pairs(), key=lambda pair: pair[0].group):
            lines.append(_line(f"**{group}**", *[""] * len(self.titles)))
            for scenario, row in members:
                shown = [_shown(scenario, row.get(name)) for name in self.titles]
                lines.append(_line(scenario.name, *shown))
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return the remarks on scenarios."""
        return [
            f"{scenario.name}: {remark}"
            for scenario in self.scenarios
            if (remark := scenario.convention or scenario.unknowable or scenario.note)
        ]

    def problems(self) -> list[str]:
        """Return the questions without an answer, with the reason."""
        return [
            f"{self.titles[name]}: {scenario.name}: {cell.problem}"
            for scenario, row in self._pairs()
            for name, cell in row.items()
            if name in self.titles and cell.problem
        ]

    def as_builtins(self) -> dict[str, Any]:
        """Return all answers and totals as values of JSON."""
        return {
            "totals": {
                name: to_builtins(self.by_cause(name))
                | {"rows": to_builtins(self.by_row(name))}
                | {"unknowable": to_builtins(self.unknowable(name))}
                for name in self.titles
            },
            "cells": [
                {
                    "scenario": scenario.name,
                    "group": scenario.group,
                    "cause": scenario.root_cause,
                    "is_scored": scenario.is_scored,
                    "systems": {name: _detailed(cell) for name, cell in row.items()},
                }
                for scenario, row in self._pairs()
            ],
        }

    def _pairs(self) -> list[tuple[Scenario, Mapping[str, Cell]]]:
        return list(zip(self.scenarios, self.rows, strict=True))

    def _head(self, corner: str) -> list[str]:
        return [_line(corner, *self.titles.values()), _line(*["---"] * (len(self.titles) + 1))]


def page(table: Table, head: str, unavailable: Sequence[str], fairness: Sequence[str]) -> str:
    """Return the whole table as Markdown. `fairness`: remarks on the systems beside the method."""
    remarks = "\n".join(f"- {line}" for line in (*METHOD, *fairness, *table.notes()))
    problems = [f"Not answered: {problem}" for problem in table.problems()]
    missing = [f"Not here: {reason}" for reason in unavailable]
    parts = [f"# Conformance\n\n{head}", *missing, table.totals(), LEGEND, table.cause_lines()]
    return "\n\n".join([*parts, table.row_lines(), *problems, remarks]) + "\n"


def badge(score: Score) -> str:
    """Return an SVG badge: right causes of all, and the number of those wrong without a word."""
    text = f"{score.right} of {score.count}, {score.wrong} silently wrong"
    colour = "#2e7d32" if not score.wrong else "#b26a00" if score.right > score.wrong else "#b3261e"
    label, left, right = "KV conformance", 106, 6 * len(text) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {text}"><title>{label}: {text}</title>'
        f'<rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2:.0f}" y="14">{label}</text>'
        f'<text x="{left + right / 2:.0f}" y="14">{text}</text></g></svg>\n'
    )


def _joint(cells: Sequence[Cell]) -> str:
    if not cells:
        return NOT_SCORED
    mark = joint_mark(cells)
    if mark is not Mark.RIGHT:
        wrong = sum(cell.mark is not Mark.RIGHT for cell in cells)
        return f"{mark.value} {wrong} of {len(cells)}" if len(cells) > 1 else mark.value
    is_doubted = any(cell.is_false_alarm for cell in cells)
    is_warned = any(cell.is_false_warning for cell in cells)
    return f"{mark.value}{_reservations(is_doubted, is_warned)}"


def _reservations(is_doubted: bool, is_warned: bool) -> str:
    return " doubted" * is_doubted + " warned" * is_warned


def _shown(scenario: Scenario, cell: Cell | None) -> str:
    if cell is None:
        return NOT_SCORED
    if scenario.convention:
        counts = [q.compared.counts for q in cell.questions]
        return f"({', '.join(_counted(c) for each in counts for c in each)})"
    shown = _result(cell)
    return f"({shown})" if scenario.unknowable else shown


def _result(cell: Cell) -> str:
    if cell.problem:
        return f"{Mark.WRONG.value} no answer"
    if cell.mark is Mark.RIGHT:
        return f"{Mark.RIGHT.value}{_reservations(cell.is_false_alarm, cell.is_false_warning)}"
    numbers = [(cell.ghosts, "ghosts"), (cell.missing, "missing")]
    off = ", ".join(f"{number} {word}" for number, word in numbers if number)
    return f"{cell.mark.value} {off}" + (f" ({cell.said})" if cell.said else "")


def _counted(blocks: int | None) -> str:
    return "–" if blocks is None else str(blocks)


def _detailed(cell: Cell) -> dict[str, Any]:
    return {
        "mark": cell.mark.value,
        "certain": cell.is_certain,
        "ghosts": cell.ghosts,
        "missing": cell.missing,
        "said": cell.said,
        "problem": cell.problem,
        "remarks": list(cell.remarks[:3]),
        "answers": [
            {"truth": question.truth, "counts": question.compared.counts}
            for question in cell.questions
        ],
    }


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

"""Figures of documents: measured ones come from benchmarks/results, limits from the code.

A document with figures is made from a template of the same name in docs/templates:

    {{ row("forward", "latency", "beside vllm-router").ours | n }} µs      a row of a result
    {{ total("conformance", "ours", "right") }}                            a total of a result
    {{ rows("rates", "simulated", "*60 s") | map(attribute="ours") | max }}   of several rows
    {{ code("router.discovery.worker_verdicts:GONE_S") | n }} s            a limit or a default
    {{ setting("reservation_ttl_s") | n }} s                               a default of `kv-router serve`
    {{ given("70 B") }}                                                    a condition, not a finding
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
from msgspec import Struct

from router.config.router import RouterConfig
from router.runtime.process.settings import settings_of

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "docs" / "templates"
RESULTS = ROOT / "benchmarks" / "results"


class Figure(Struct, frozen=True):
    """A row of a result. `ratio`: ours to the peer's, or as the benchmark defines it.

    `error`: half the width of the ratio's confidence interval.
    """

    ours: float
    peer: float
    ratio: float
    error: float
    goal: float
    holds: bool


class Counts(Struct, frozen=True):
    """Scenarios, or root causes, of a system in `conformance`. `doubted` ones are right as well."""

    right: int
    doubted: int
    said: int
    wrong: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.right + self.said + self.wrong

    def plus(self, cell: Mapping[str, Any]) -> "Counts":
        """Return the counts with one more scenario."""
        is_right = cell["mark"] == "✓"
        is_said = cell["mark"] == "◐"
        return Counts(
            self.right + is_right,
            self.doubted + (is_right and not cell["certain"]),
            self.said + is_said,
            self.wrong + (not is_right and not is_said),
        )


def rows(result: str, section: str, name: str) -> list[Figure]:
    """Return the rows of a section whose name matches; `*` stands for anything.

    Raises LookupError if there is none.
    """
    every = read(result)[section]["rows"]
    found = [each for each in every if fnmatchcase(each["name"], name)]
    if not found:
        raise LookupError(_unmatched(result, section, name, 0))
    return [Figure(**{field: each[field] for field in Figure.__struct_fields__}) for each in found]


def row(result: str, section: str, name: str) -> Figure:
    """Return the one row of a section whose name matches. Raises LookupError without exactly one."""
    found = rows(result, section, name)
    if len(found) != 1:
        raise LookupError(_unmatched(result, section, name, len(found)))
    return found[0]


def _unmatched(result: str, section: str, name: str, count: int) -> str:
    names = ", ".join(each["name"] for each in read(result)[section]["rows"])
    return f"{result}, {section}: {count} rows match {name!r} (there are: {names})"


def total(result: str, *path: str) -> Any:
    """Return a value of `totals` of a result. Raises KeyError if there is none."""
    found = read(result)["totals"]
    for key in path:
        found = found[key]
    return found


def exactness(system: str) -> Counts:
    """Return the counts of a system in `conformance`."""
    found = total("conformance", system)
    return Counts(found["right"], found["doubted"], found["said"], found["wrong"])


SYSTEMS = {
    "ours": "kv-router",
    "dynamo": "Dynamo's service",
    "dynamo-runtime": "Dynamo's runtime",
    "vllm-router": "vllm-router",
}


def systems() -> dict[str, Counts]:
    """Return the counts of all systems in `conformance`, by their titles."""
    return {SYSTEMS.get(name, name): exactness(name) for name in read("conformance")["totals"]}


def hybrid_answers() -> list[tuple[str, int, dict[str, tuple[int, int, int]]]]:
    """Return the streams of hybrid models in `conformance`: prompts that were asked, and answers.

    Answers, by system: how many are right, too many blocks, too few.
    """
    found = []
    for each in read("conformance")["cells"]:
        if each["cause"].startswith("a hybrid model"):
            given = {name: _compared(answer["answers"]) for name, answer in each["systems"].items()}
            found.append((each["scenario"], sum(given["ours"]), given))
    return found


def _compared(answers: list[dict[str, list[int]]]) -> tuple[int, int, int]:
    pairs = [pair for each in answers for pair in zip(each["counts"], each["truth"], strict=True)]
    more = sum(count > truth for count, truth in pairs)
    less = sum(count < truth for count, truth in pairs)
    return len(pairs) - more - less, more, less


def scored() -> int:
    """Return the number of scenarios of `conformance` that can be right or wrong."""
    return sum(total("conformance", "ours", key) for key in ("right", "said", "wrong"))


def facts(result: str, section: str) -> str:
    """Return machine, commit, date and load of a section, as text."""
    known = read(result)[section]
    load = f"load {known['load before']:.1f} before and {known['load after']:.1f} after"
    parts = [known["machine"], f"commit {known['commit']}", known.get("date"), known["scale"], load]
    return "; ".join(part for part in parts if part)


def code(name: str) -> Any:
    """Return a constant (`module:NAME`), or a default (`module:Class.field`)."""
    module, _, path = name.partition(":")
    owner, _, field = path.partition(".")
    found = getattr(import_module(module), owner)
    if not field:
        return found
    return dict(zip(found.__struct_fields__[::-1], found.__struct_defaults__[::-1], strict=False))[
        field
    ]


def setting(name: str) -> Any:
    """Return the default of a setting of `kv-router serve`."""
    return next(each.value for each in settings_of(RouterConfig()) if each.name == name)


def given(text: str) -> str:
    """Return a condition of a measurement or an example, which nothing measures."""
    return text


def number(value: float, digits: int = 0) -> str:
    """Return a number with commas."""
    return f"{value:,.{digits}f}"


@cache
def read(result: str) -> Mapping[str, Any]:
    """Return a result by the name of its file."""
    found: Mapping[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())
    return found


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        comment_start_string="{##",
        comment_end_string="##}",
        autoescape=False,  # noqa: S701  Markdown, from files of this repository alone
    )
    made.globals |= {
        each.__name__: each
        for each in (
            *(row, rows, total, exactness, systems, scored, hybrid_answers),
            *(facts, code, setting, given),
        )
    }
    made.filters["n"] = number
    return made


def templates() -> list[str]:
    """Return the paths of the documents that have a template."""
    return sorted(str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.md"))


def document(path: str) -> str:
    """Return the content of a document, made from its template."""
    return _environment().from_string((TEMPLATES / path).read_text()).render()

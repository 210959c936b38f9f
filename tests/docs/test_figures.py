"""Measured figures of documents come from results; no page has one that was written by hand."""

import json
import re
from pathlib import Path

import figures
import made
import pytest

ROOT = Path(__file__).parents[2]
RATE = r"M blocks/s|M/s|M a second|cycles/s|per second|a second"
UNIT = rf"(?:µs|ms|ns|s|×|%|times|cores|MB|GB|MiB|GiB|B|{RATE})"
NUMBERS = r"\d[\d,.]*(?:\s*(?:to|–|/|and|;)\s*\d[\d,.]*)*"
FIGURE = re.compile(rf"(?<![\w.#/`-]){NUMBERS}\s?{UNIT}(?![\w])")
OUTPUT = re.compile(r"^```.*?^```", re.M | re.S)
"""What commands print is an example."""


def figures_written_by_hand(template):
    """Return figures with a unit that are neither read from a result nor from the code."""
    text = re.sub(r"\{%.*?%\}", "", OUTPUT.sub("", template), flags=re.S)
    return FIGURE.findall(re.sub(r"\{\{.*?\}\}", "…", text, flags=re.S))


FOLDERS = ("docs", "router", "worker_agent", "benchmarks", "deploy", "examples", "tests")
WRITTEN_BY_BENCHMARKS = {"benchmarks/results/conformance.md"}
GIVEN = json.loads((Path(__file__).parent / "given_figures.json").read_text())
"""Limits, defaults and conditions that documents name, by document: none of them is measured."""


def documents():
    """Return the paths of all documents that people write."""
    found = [
        *ROOT.glob("*.md"),
        *(path for each in FOLDERS for path in (ROOT / each).rglob("*.md")),
    ]
    paths = {path.relative_to(ROOT) for path in found}
    templates = figures.TEMPLATES.relative_to(ROOT)
    return sorted(
        str(path)
        for path in paths
        if not {*made.WHOLE, *WRITTEN_BY_BENCHMARKS} & {str(path)}
        and not path.is_relative_to(templates)
        and not any(part.startswith(".") or part == "node_modules" for part in path.parts[:-1])
    )


@pytest.mark.parametrize("path", figures.templates())
def test_template_has_no_measured_figure_of_its_own(path):
    assert figures_written_by_hand((figures.TEMPLATES / path).read_text()) == []


@pytest.mark.parametrize("path", documents())
def test_figures_of_a_document_are_listed_as_limits_or_conditions(path):
    found = {" ".join(each.split()) for each in figures_written_by_hand((ROOT / path).read_text())}
    assert sorted(found) == GIVEN.get(path, [])


def test_limits_and_conditions_are_those_of_documents():
    assert GIVEN.keys() <= set(documents())


def test_no_limit_or_condition_is_in_microseconds():
    assert not [each for listed in GIVEN.values() for each in listed if each.endswith("µs")]


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3.5 ms.",
        "| 1,200 / 30 µs |",
        "**0.83 ×**",
        "9 % more",
        "2.5 to 3 s",
        "44 MB",
        "1.0 M/s",
    ],
)
def test_figure_written_by_hand_is_found(text):
    assert len(figures_written_by_hand(text)) == 1


@pytest.mark.parametrize(
    "text", ['{{ given("70 B") }}', "vLLM 0.32", "two cores", "```\n3 ms\n```", "`--port 8092`"]
)
def test_other_numbers_are_not_figures(text):
    assert figures_written_by_hand(text) == []


def test_row_that_is_not_in_a_result_is_an_error_with_the_names_that_are():
    with pytest.raises(LookupError, match="there are: beside vllm-router"):
        figures.row("forward", "latency", "beside nothing")


def test_limit_is_read_from_the_code():
    assert figures.code("router.discovery.worker_verdicts:GONE_S") == 5.0
    assert figures.code("router.scheduler.settings:TrustWeights.degraded") == 0.5
    assert figures.setting("reservation_ttl_s") == 300.0

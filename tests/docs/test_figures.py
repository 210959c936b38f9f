"""Measured figures of documents come from results; no page has one that was written by hand."""

import re
from pathlib import Path

import figures
import made
import pytest

ROOT = Path(__file__).parents[2]
UNIT = r"(?:µs|ms|s|×|%|MB|GB|MiB|GiB|B|M blocks/s|M/s|M a second|cycles/s|per second|a second)"
NUMBERS = r"\d[\d,.]*(?:\s*(?:to|–|/|and|;)\s*\d[\d,.]*)*"
FIGURE = re.compile(rf"(?<![\w.#/`-]){NUMBERS}\s?{UNIT}(?![\w])")
OUTPUT = re.compile(r"^```.*?^```", re.M | re.S)
"""What commands print is an example."""


def figures_written_by_hand(template):
    """Return figures with a unit that are neither read from a result nor from the code."""
    text = re.sub(r"\{%.*?%\}", "", OUTPUT.sub("", template), flags=re.S)
    return FIGURE.findall(re.sub(r"\{\{.*?\}\}", "…", text, flags=re.S))


BY_HAND = [
    path
    for path in ("README.md", *sorted(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md")))
    if path not in made.WHOLE
]


@pytest.mark.parametrize("path", figures.templates())
def test_template_has_no_measured_figure_of_its_own(path):
    assert figures_written_by_hand((figures.TEMPLATES / path).read_text()) == []


@pytest.mark.parametrize("path", BY_HAND)
def test_document_without_a_template_has_no_measured_figure(path):
    assert figures_written_by_hand((ROOT / path).read_text()) == []


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

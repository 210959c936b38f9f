"""The examples for scalers name metrics and labels that routers have."""

import re
from pathlib import Path

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
METRICS = (ROOT / "router/observability/METRICS.md").read_text()
OBJECTS = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
TRIGGERS = [trigger for each in OBJECTS for trigger in each["spec"]["triggers"]]


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda each: each["type"])
def test_queries_of_scalers_have_results(trigger):
    """And a threshold of 1, as the number of workers is itself what is wanted."""
    query = promql_parser.parse(trigger["metadata"]["query"]).expr
    name, labels = query.name, {each.name for each in query.matchers.matchers}
    row = re.search(rf"^\| `{name}` \| gauge \| ([^|]*) \|", METRICS, re.M)
    assert row is not None
    assert labels <= set(row[1].split(", "))
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert trigger["metadata"]["ignoreNullValues"] == "false"  # unknown is not 0


def test_signals_that_the_page_explains_exist():
    section = PAGE.partition("## Scaling\n")[2].partition("\n## ")[0]
    schema = (ROOT / "router/protocol/capacity.py").read_text()
    table = section.partition("\n**")[0]
    named = set(re.findall(r"`(?:loads\[\]\.|mean_request\.)?([a-z_]+)`", table))
    signals = {each for each in named if each.startswith(("workers_", "booked", "queue", "kv_u"))}
    assert signals
    assert all(f"    {each}: " in schema for each in signals)

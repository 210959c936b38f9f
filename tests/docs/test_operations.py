"""The page for operators names what there is; every page links to what there is."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.config.router import RouterConfig
from router.runtime.process.settings import settings_of
from worker_agent.bridge.metrics import bridge_metrics
from worker_agent.config.bridge import BridgeConfig
from worker_agent.config.reference import ReferenceConfig
from worker_agent.operations.metrics import expose_tiers

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("[!T]*.md"))]
TEXT = (ROOT / "docs/operations.md").read_text()
METRICS = (ROOT / "router/observability/METRICS.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(kv_router_\w+|kv_engine_\w+)", TEXT))))
def test_router_metric_is_documented(name):
    assert f"| `{name}` |" in METRICS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(kv_agent_\w+)`", TEXT))))
def test_agent_metric_is_documented(name):
    registry = bridge_metrics(str, list, SimpleNamespace(readings=0, failures=0, problem=None))
    expose_tiers(registry, "default", 16, list, dict)
    assert name.removesuffix("_total") in {family.name for family in registry.collect()}


def test_every_row_of_sizes_names_its_benchmark():
    table = TEXT.partition("| with |\n")[2].partition("\n\n")[0].splitlines()[1:]
    for row in table:
        named = re.findall(r"`(benchmarks/\w+\.py)`", row)
        assert named
        assert all((ROOT / each).is_file() for each in named)


def test_settings_are_known():
    configs = (RouterConfig, ReferenceConfig, BridgeConfig)
    known = {each.name for config in configs for each in settings_of(config())}
    changes = TEXT.partition("## What to look at")[2]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", changes))
    words = {each for each in named if not each.startswith("kv_")} - {"not_schedulable_reasons"}
    assert words <= known | {"router_config_override"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, place in re.findall(r"\]\(([^)#:]*)(#([\w-]+))?\)", page.read_text()):
        linked = (page.parent / target) if target else page
        assert linked.exists(), target
        if place:
            assert place in map(_anchor, re.findall(r"^#+ (.*)", linked.read_text(), re.M))


def _anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_alert_has_a_runbook_line():
    alerts = (ROOT / "deploy/chart/files/alerts.yaml").read_text()
    names = re.findall(r"alert: (\w+)", alerts)
    assert re.findall(r"^\| `(Kv\w+)` \|", TEXT, re.MULTILINE) == names

"""The page for operators names what there is; every page links to what there is."""

import re
from pathlib import Path

import pytest

from router.config import RouterConfig
from worker_agent.bridge_config import BridgeConfig
from worker_agent.config import ReferenceConfig

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md"]
TEXT = (ROOT / "docs/operations.md").read_text()
METRICS = (ROOT / "router/METRICS.md").read_text()
AGENTS = "".join(path.read_text() for path in (ROOT / "worker_agent").rglob("*metrics.py"))
COMPOSED = re.compile(r'f"(kv_agent_\w+_)\{')


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(kv_router_\w+|kv_engine_\w+)", TEXT))))
def test_a_metric_is_in_the_list(name):
    assert f"| `{name}` |" in METRICS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(kv_agent_\w+)`", TEXT))))
def test_an_agent_has_the_metric(name):
    bare = name.removesuffix("_total")
    prefixes = [each for each in COMPOSED.findall(AGENTS) if bare.startswith(each)]
    endings = [f'"{bare.removeprefix(each)}"' for each in prefixes]
    assert f'"{bare}"' in AGENTS or any(each in AGENTS for each in endings)


def test_every_row_of_sizes_names_its_benchmark():
    table = TEXT.partition("| with |\n")[2].partition("\n\n")[0].splitlines()[1:]
    for row in table:
        named = re.findall(r"`(benchmarks/\w+\.py)`", row)
        assert named
        assert all((ROOT / each).is_file() for each in named)


def test_settings_are_known():
    configs = (RouterConfig, ReferenceConfig, BridgeConfig)
    known = {field for config in configs for field in config.__struct_fields__}
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

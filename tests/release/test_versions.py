"""The version is said in one place, and versions of others have a lower bound each."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml

from support.values.lowest import lowest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_chart_deploys_this_version():
    chart = yaml.safe_load((ROOT / "deploy/chart/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"] == version("kv-router")


def test_the_changelog_begins_with_this_version_or_the_next():
    first = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n")[0]
    assert first == "[Unreleased]" or first.startswith(f"[{PROJECT['version']}]")


def test_whatever_is_required_has_a_lower_bound():
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + [
        each for name, some in extras.items() if name != "dev" for each in some
    ]
    assert len(lowest()) == len(asked)
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert all(f"\n{each.partition('==')[0]}==" in pinned for each in lowest())

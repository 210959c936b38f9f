"""What `make site` and the packages' page on an index are made of."""

import re
from pathlib import Path

import pytest
import yaml
from site_links import anchor, on_page_markdown

from hatch_build import addresses, published

ROOT = Path(__file__).parents[2]
NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
REPOSITORY = "https://example.org/kv-router"
README = (ROOT / "README.md").read_text()


def pages_of(entries):
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            yield from (page for pages in entry.values() for page in pages)


def test_navigation_names_every_page_once():
    assert sorted(pages_of(NAVIGATION)) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def test_link_out_of_the_pages_leads_to_the_repository(monkeypatch):
    monkeypatch.setenv("KV_ROUTER_REPOSITORY", REPOSITORY)
    link = "[who](../SECURITY.md#ports), [here](wire.md)"
    shown = f"[who]({REPOSITORY}/blob/HEAD/SECURITY.md#ports), [here](wire.md)"
    assert on_page_markdown(link) == shown


def test_link_out_of_the_pages_is_text_without_a_repository(monkeypatch):
    monkeypatch.delenv("KV_ROUTER_REPOSITORY", raising=False)
    assert on_page_markdown("[who](../SECURITY.md#ports)") == "who"


def test_anchor_is_that_of_github():
    assert anchor("Links, and `anchors` – how?", "-") == "links-and-anchors--how"


def test_every_link_of_the_published_readme_is_absolute():
    shown = published(README, REPOSITORY, "1.2.3")
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(targets) == len(re.findall(r"\]\(", README))
    assert all(re.match(r"https://|#", target) for target in targets)
    picture = f"{REPOSITORY}/raw/v1.2.3/docs/pictures/dashboard-light.png"
    assert f"![The dashboard of a fleet of two workers]({picture})" in shown


@pytest.mark.parametrize("text", ["[a](docs/x.md#y) b", "![p](docs/p.png)a b"])
def test_published_page_without_a_repository_has_no_link(text):
    assert published(text, "", "1.2.3") == "a b"


def test_addresses_lead_to_files_of_the_version():
    found = addresses(REPOSITORY, "1.2.3")
    assert found["Changelog"] == f"{REPOSITORY}/blob/v1.2.3/CHANGELOG.md"
    assert addresses("", "1.2.3") == {}

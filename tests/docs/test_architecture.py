"""The pages for contributors name files, folders, classes and functions that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
WALKS = PAGE[PAGE.index("## Five walks") : PAGE.index("## Where to add")]
OTHERS = ("CONTRIBUTING.md", "docs/versioning.md")
TEXT = PAGE + "".join((ROOT / name).read_text() for name in OTHERS)
ROOMS = "router|worker_agent|tests|benchmarks|docs"
FILES = sorted(set(re.findall(rf"`((?:{ROOMS})/[\w/]+\.\w+)`", TEXT)))
FOLDERS = sorted(set(re.findall(rf"`((?:{ROOMS})/[\w/]*/)`", TEXT)))
NAMES = sorted(set(re.findall(r"`((?:router|worker_agent)/[\w/]+\.py)` `([\w.]+)`", PAGE)))
MOST_STEPS = 12


@pytest.mark.parametrize("path", FILES)
def test_named_file_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("path", FOLDERS)
def test_named_folder_exists(path):
    assert (ROOT / path).is_dir()


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_named_function_is_in_its_file(path, name):
    source = (ROOT / path).read_text()
    for part in name.split("."):
        assert re.search(rf"(class |def |self\.){part}\b", source), part


@pytest.mark.parametrize("walk", WALKS.split("\n### ")[1:], ids=lambda walk: walk.split("\n")[0])
def test_walk_has_at_most_a_dozen_steps(walk):
    steps = re.findall(r"^\d+\. `", walk, re.MULTILINE)
    assert 0 < len(steps) <= MOST_STEPS


def test_every_room_of_the_picture_exists():
    picture = PAGE[PAGE.index("```\nrouter/") :].split("```")[1]
    rooms = re.findall(r"^[├└]── (\w+)/", picture.split("worker_agent/")[0], re.MULTILINE)
    assert set(rooms) == {
        each.name for each in (ROOT / "router").iterdir() if (each / "__init__.py").exists()
    }

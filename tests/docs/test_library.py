"""The block manager as a library: its page's examples run, and the names that it lists exist."""

import ast
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "block-manager.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CODE = "\n".join(EXAMPLES)
PARTS = ("worker_agent", "router/publisher", "router/sequence/hashing")
LIBRARY = [
    "blocks/handles", "blocks/names", "layout/config", "layout/descriptor", "layout/groups",
    "layout/layout", "layout/orders", "layout/strides", "manager/config", "manager/manager",
    "storage/base", "storage/disk", "storage/memory", "storage/registered",
    "transfer/layout_copies", "transfer/physical", "connector/slots/progress",
    "connector/slots/scheduler", "connector/slots/slot_manager", "connector/slots/slot_table",
]  # fmt: skip
"""The modules of which each public class is in an example, or is returned by one that is."""
RETURNED = {
    "AgentMetadata", "Agent", "BlockIndexError", "Cell", "Configured", "Decided", "DiskAbilities",
    "FullyContiguousDetails", "Guard", "Handle", "ImmutableBlocks", "InvalidTransition", "LaidOut",
    "LayerSeparateDetails", "LayoutDetails", "MemoryDescriptor", "MutableBlocks", "Quarantine",
    "RegisteredLayout", "Registrations", "Reserved", "Strides", "Tier", "WeakBlocks",
}  # fmt: skip


def defined(path):
    """The names of a module: its own, and those in its classes."""
    for node in ast.parse(path.read_text()).body:
        for name in _names(node):
            yield name
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                yield from (f"{name}.{each}" for each in _names(inner))


def _names(node):
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = [node.name] if hasattr(node, "name") else [getattr(each, "id", "") for each in targets]
    return [name for name in names if name and not name.startswith("_")]


@pytest.fixture(scope="module")
def known():
    paths = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    return {name for path in paths for name in defined(path)}


def rows(title):
    [table] = re.findall(rf"\n## {title}\n.*?\|---\|---\|\n(.*?)\n(?:\n|$)", PAGE, re.DOTALL)
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_examples_print_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(CODE, "docs/block-manager.md", "exec"), {})
    assert printed.getvalue().splitlines() == re.findall(r"# > (.*)", CODE)


@pytest.mark.parametrize("module", LIBRARY)
def test_each_public_class_has_an_example(module):
    tree = ast.parse((ROOT / "worker_agent" / f"{module}.py").read_text())
    classes = {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
    shown = {name for name in classes if re.search(rf"\b{name}\b", CODE)}
    assert {name for name in classes if not name.startswith("_")} <= shown | RETURNED


@pytest.mark.parametrize("row", rows("Dynamo's names"), ids=lambda row: row[0][:40])
def test_name_of_dynamo_is_here_or_has_a_reason(row, known):
    _, here = row
    names = set(re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)`", here)) - {"rule"}
    assert names <= known
    assert names or "—: " in here

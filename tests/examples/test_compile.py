"""Every example compiles; `make test-integrations` runs them with the systems that they are for."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_compiles_and_says_how_it_is_used(path):
    code = compile(path.read_text(), path, "exec")
    assert "\n    " in code.co_consts[0]

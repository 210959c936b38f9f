"""The list of attacks names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
README = TESTS.parents[1] / "router" / "security" / "README.md"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", README.read_text())


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_an_attack_has_its_test(file, name):
    assert f"def {name}(" in (TESTS / file).read_text()


def test_the_list_is_long():
    assert len(NAMED) > 20

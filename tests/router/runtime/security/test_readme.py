"""The list of attacks names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TESTS = ROOT / "tests/router"
README = ROOT / "router/runtime/security/README.md"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", README.read_text())


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_an_attack_has_its_test(file, name):
    assert f"def {name}(" in (TESTS / file).read_text()


def test_threat_list_is_complete():
    assert len(NAMED) > 20

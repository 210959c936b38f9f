"""Packages of others have licences that permit what ours does."""

import re
from pathlib import Path

import pytest
from licences import is_permissive

THIRD_PARTY = (Path(__file__).parents[2] / "THIRD_PARTY.md").read_text()


def test_listed_packages_have_permissive_licences():
    rows = re.findall(r"^\| ([\w-]+)(?: \(extra `\w+`\))? \| (.+) \|$", THIRD_PARTY, re.MULTILINE)
    named = {name: licence for name, licence in rows if name != "package"}
    assert {"msgspec", "torch"} <= {*named}
    assert not {name: licence for name, licence in named.items() if not is_permissive(licence)}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GNU Affero General Public License v3", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("", False),
    ],
)
def test_expressions_are_permissive_if_each_part_is(named, expected):
    assert is_permissive(named) is expected

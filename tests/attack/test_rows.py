"""Each attack of the table in the security README is one that `make attack` tries."""

import ast
from pathlib import Path

import pytest

from attack.rows import ROOT, ROWS, TABLE, Inside, ids_inside, table

HERE = Path(__file__).parent


def names_in(path):
    """The names of the tests in a file; none if there is no such file."""
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.fixture(scope="module")
def rows():
    rows = table(TABLE.read_text())
    assert len(rows) > 40
    return rows


def test_each_row_of_the_table_is_tried(rows):
    missing = sorted(rows.keys() - ROWS.keys())
    assert not missing, (
        f"rows of {TABLE.relative_to(ROOT)} that tests/attack/rows.py does not have: {missing}. "
        "Write a test in tests/attack that tries the attack against a running process, and name it "
        "there; if only a test inside a process can try it, enter Inside(why)."
    )


def test_no_row_is_left_of_an_attack_that_is_not_in_the_table(rows):
    assert sorted(ROWS.keys() - rows.keys()) == []


def test_tests_of_all_rows_exist(rows):
    outside = [
        f"tests/attack/{each}" for row in ROWS.values() if isinstance(row, tuple) for each in row
    ]
    for each in (*outside, *ids_inside(TABLE.read_text())):
        path, _, name = each.partition("::")
        assert name in names_in(ROOT / path), each


def test_files_of_attacks_have_the_marker_and_a_row():
    """A test without it would be run by `make test`."""
    named = {each for row in ROWS.values() if not isinstance(row, Inside) for each in row}
    for path in HERE.glob("test_*.py"):
        is_attack = "pytest.mark.attack" in path.read_text().split("\n\ndef ")[0]
        assert is_attack == any(each.startswith(f"{path.name}::") for each in named), path.name

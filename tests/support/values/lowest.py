"""Constraints to the lowest versions that pyproject.toml allows; run as a program, prints them."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
BOUND = re.compile(r"([\w-]+)>=([\d.]+)")


def lowest():
    """`name==version` of each, in order of name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    named = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = [BOUND.fullmatch(each) for some in named for each in some]
    return sorted(f"{found[1]}=={found[2]}" for found in bounds if found)


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest()) + "\n")

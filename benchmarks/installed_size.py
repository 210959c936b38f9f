"""Bytes of an installed distribution with all that it requires; needs nothing but Python.

python benchmarks/installed_size.py DISTRIBUTION
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

NAME = re.compile(r"[\w.-]+")
SOURCE = Path(__file__).resolve().parents[1]
"""Where the packages of a distribution lie that is installed from here, to be edited."""


def installed_bytes(name: str) -> int:
    """Of its own files, and those of every distribution it needs without extras."""
    return sum(_bytes_of(each) for each in required(name).values())


def required(name: str) -> dict[str, Distribution]:
    """By name, itself included; what is not installed is not needed on this machine."""
    found: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name not in found and (each := _installed(name)):
            found[name] = each
            wanted += [found.group() for found in map(NAME.match, _needs(each)) if found]
    return found


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _needs(each: Distribution) -> list[str]:
    return [text for text in each.requires or () if "extra ==" not in text and "pypy" not in text]


def _bytes_of(each: Distribution) -> int:
    files = [Path(str(each.locate_file(file))) for file in each.files or ()]
    if any(file.name == "direct_url.json" and "editable" in file.read_text() for file in files):
        files += [file for top in ("router", "worker_agent") for file in (SOURCE / top).rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    print(installed_bytes(sys.argv[1]))

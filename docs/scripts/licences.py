"""THIRD_PARTY.md: the licences of what an installation brings along.

    python docs/scripts/licences.py

From the metadata of what is installed here: what `kv-router` requires with all that it requires in
turn, and what each extra names.
"""

import re
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from installed_size import required

FILE = Path(__file__).parents[2] / "THIRD_PARTY.md"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
HEAD = """# Licences of others

kv-router is Apache-2.0 (LICENSE) and contains no code of others. Installing it installs these, each
under its own licence, whose text comes with it; `docs/scripts/licences.py` makes the list.

"""
TABLE = "| package | licence |\n|---|---|\n"
PERMISSIVE = re.compile(
    r"MIT|BSD|3-Clause BSD|0BSD|ISC|Apache|PSF|Zlib|CC0|BSL-1\.0|MPL[- ]2\.0|Mozilla Public License 2\.0|Unlicense"
)
"""Licences under which a package may be installed with ours; MPL-2.0 concerns changes to its own files."""
TEXTS = """
The demonstration's conversations (`router/tools/up/demo/conversations.json`) quote books in the public
domain, which the file names.
"""


def third_party() -> str:
    """Return the text of the file."""
    own = required("kv-router")
    del own["kv-router"]
    asked = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    named = {
        re.split("[<>=]", each)[0]: extra
        for extra, some in asked.items()
        for each in some
        if extra != "dev"
    }
    extras = {name: extra for name, extra in named.items() if name not in own}
    rows = [f"| {name} | {licence(each)} |\n" for name, each in sorted(own.items())]
    more = [
        f"| {name} (extra `{extra}`) | {licence(distribution(name))} |\n"
        for name, extra in sorted(extras.items())
    ]
    return "".join([HEAD, TABLE, *rows, *more, TEXTS])


def is_permissive(named: str) -> bool:
    """Return whether every licence of an expression is permissive, or one of its alternatives."""
    return all(
        any(PERMISSIVE.match(either.strip("() ")) for either in re.split(r" OR ", each))
        for each in re.split(r" AND |; ", named)
    )


def licence(each: Distribution) -> str:
    """As its metadata says it, the newer fields first."""
    said = each.metadata.get("License-Expression") or each.metadata.get("License") or ""
    classified = [
        text.rpartition(" :: ")[2]
        for text in each.metadata.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    if said and "\n" not in said and len(said) < 60:
        return said
    return "; ".join(classified) or said.strip().splitlines()[0].strip()


if __name__ == "__main__":
    FILE.write_text(third_party())

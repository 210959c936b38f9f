"""The packages that images install, from `deploy/images`."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "deploy/images"


def locked(name):
    """Return the version and the SHA-256 sums of each package of a lock file, by name."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", " ")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    hashes = [each for row in rows for each in row[1:]]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
    packages = {row[0]: {each.rpartition(":")[2] for each in row[1:]} for row in rows}
    return {name.split("==")[0]: (name.split("==")[1], sums) for name, sums in packages.items()}

"""Virtual environments of our service as its image has it, and of the systems that come from PyPI.

Each is made on first use, all of them with the same interpreter.
"""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
REPOSITORY = BENCHMARKS.parent


def base_python() -> str:
    """Return the interpreter of all environments: the distribution's, if it has this version.

    The interpreters of images and distributions are built with profile-guided and link-time
    optimization. A plain build, which is pyenv's default, takes a quarter to two fifths longer.
    """
    python = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    return str(python if python.exists() else Path(sys.executable).resolve())


def shipped_python() -> Path:
    """Return an interpreter with this working tree and the packages of the router's image."""
    locked = REPOSITORY / "deploy" / "images" / "router.txt"
    tree = ("--no-deps", "--editable", str(REPOSITORY))
    return python_of(BENCHMARKS / ".shipped-venv", locked, tree)


def python_of(environment: Path, requirements: Path, *more: tuple[str, ...]) -> Path:
    """Return an environment's interpreter, with these requirements installed, and then `more`."""
    python, stamp = environment / "bin" / "python", environment / ".installed"
    wanted = f"{base_python()} {more}\n{requirements.read_text()}"
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {requirements.name} into {environment.name}, once", file=sys.stderr)
        make = [base_python(), "-m", "venv", "--clear", "--without-pip", environment]
        subprocess.run(make, check=True)
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        for packages in (("-r", str(requirements)), *more):
            subprocess.run([*install, "--disable-pip-version-check", *packages], check=True)
        stamp.write_text(wanted)
    return python

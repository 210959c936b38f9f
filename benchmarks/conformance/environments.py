"""Virtual environments of the systems that come from PyPI, made on first use."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent


def python_of(environment: Path, requirements: Path) -> Path:
    """Its interpreter, with exactly these requirements installed."""
    python, stamp = environment / "bin" / "python", environment / ".installed"
    wanted = requirements.read_text()
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {requirements.name} into {environment.name}, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", requirements], check=True)
        stamp.write_text(wanted)
    return python

"""A worker whose reference engine stands still in the middle of an answer while a file is there.

python held_engine.py run --held-by=FILE OPTIONS…    options of `kv-worker-agent run`
"""

import sys
import time
from pathlib import Path

from worker_agent import cli
from worker_agent.reference.engine.engine import ReferenceEngine

TOKENS = 50
"""Tokens that are generated all the same, after the file came."""


def hold(file):
    """A test may be late, and find that what it is to disturb has ended."""
    step, generated = ReferenceEngine.step, 0

    def held(self, arrived):
        nonlocal generated
        while generated >= TOKENS and file.exists():
            time.sleep(0.01)
        output = step(self, arrived)
        generated = generated + len(output.generated) if file.exists() else 0
        return output

    ReferenceEngine.step = held


if __name__ == "__main__":
    command, *options = sys.argv[1:]
    setting = next(each for each in options if each.startswith("--held-by="))
    options.remove(setting)
    hold(Path(setting.partition("=")[2]))
    sys.exit(cli.main([command, *options]))

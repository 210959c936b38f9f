"""What runs without the extra `forward`, in a process that cannot import it."""

import subprocess
import sys

PROGRAM = """
import sys
for name in ("jinja2", "tokenizers"):
    sys.modules[name] = None
import router.forward.service
import router.service.openai
"""


def test_endpoint_without_the_extra_starts():
    command = [sys.executable, "-c", PROGRAM]
    assert subprocess.run(command, check=False, capture_output=True).stderr == b""

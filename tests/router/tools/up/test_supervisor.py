"""Children are started again when they die, and stopped when we stop."""

import asyncio
import os
import signal
import sys

import pytest

from router.tools.up import supervisor
from router.tools.up.supervisor import Child
from support.processes.servers import is_alive

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True);"
    "time.sleep(60)",
]


@pytest.fixture
async def keep(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "RESTART_S", 0.05)
    tasks = []

    def keep(command, report):
        child = Child("child", command, tmp_path / "child.log")
        tasks.append(asyncio.create_task(child.keep_running(report)))
        return child, tasks[-1]

    yield keep
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def test_a_killed_child_is_reported_and_started_again(keep, eventually):
    reports = []
    child, _ = keep(SLEEP, reports.append)
    first = await eventually(lambda: child.pid)
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: child.pid != first)
    assert "child was killed by SIGKILL" in reports[0]
    assert str(child.log_path) in reports[0]


async def test_a_child_that_ends_is_waited_out_longer_each_time(keep, eventually):
    reports = []
    child, _ = keep([sys.executable, "-c", "print('why'); raise SystemExit(3)"], reports.append)
    await eventually(lambda: len(reports) >= 3)
    assert "ended with status 3, last line 'why'; retry in 0.05 s" in reports[0]
    assert "retry in 0.2 s" in reports[2]
    assert "why" in child.log_path.read_text()


async def test_children_stop_with_the_supervisor(keep, eventually):
    child, task = keep(SLEEP, lambda _: None)
    pid = await eventually(lambda: child.pid)
    task.cancel()
    await asyncio.wait([task])
    assert not is_alive(pid)


async def test_a_stubborn_child_is_killed(keep, eventually, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_S", 0.2)
    child, task = keep(STUBBORN, lambda _: None)
    await eventually(lambda: child.log_path.exists() and child.log_path.read_text())
    task.cancel()
    await asyncio.wait([task])
    assert not is_alive(child.pid)

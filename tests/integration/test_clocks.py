"""An agent whose wall clock jumps, while it runs and between two lives."""

from support.processes.servers import eventually

CLOCK = """
import time
from pathlib import Path

_real_ns, _error = time.time_ns, Path(__file__).with_name("error_s")
time.time_ns = lambda: _real_ns() + int(_error.read_text()) * 10**9
time.time = lambda: time.time_ns() / 1e9
"""
HOURS_S = 7200


class Clock:
    """The wall clock of every process started from now on."""

    def __init__(self, directory, monkeypatch):
        self._directory = directory / "clock"
        self._directory.mkdir()
        (self._directory / "sitecustomize.py").write_text(CLOCK)
        self.set_error(0)
        monkeypatch.setenv("PYTHONPATH", str(self._directory), prepend=":")

    def set_error(self, error_s):
        new = self._directory / "new"
        new.write_text(str(error_s))
        new.rename(self._directory / "error_s")


async def test_agent_recovers_from_a_clock_jump(fleet, tmp_path, monkeypatch):
    await fleet.start(workers=1)
    clock = Clock(tmp_path, monkeypatch)
    fleet.add_worker(2, is_forked=False)
    await fleet.until_ready(2)
    for jump, error_s in enumerate((HOURS_S, -HOURS_S, 0)):
        clock.set_error(error_s)
        await _cache(fleet, jump)
        await eventually(fleet.all_exact)
    known = await _incarnation(fleet)
    fleet.workers[2].kill()
    clock.set_error(-HOURS_S)
    fleet.workers[2].start()
    await eventually(lambda: _is_of_another_life(fleet, known))
    assert await _incarnation(fleet) < known
    await fleet.until_ready(2)
    assert (2, 0) not in await fleet.held_by_index()
    await _cache(fleet, 3)
    await eventually(fleet.all_exact)


async def _cache(fleet, number):
    for worker_id in (1, 2):
        prompt = f"Number {number} for {worker_id}, and long enough to be cached"
        await fleet.complete(worker_id, 0, list(prompt.encode()))
    await fleet.until_drained()
    assert len(await fleet.held_by_index()) == 2


async def _incarnation(fleet):
    by_id = {worker["worker_id"]: worker for worker in await fleet.get("/workers")}
    return by_id[2]["incarnation"] if 2 in by_id else None


async def _is_of_another_life(fleet, known):
    return await _incarnation(fleet) not in (None, known)

"""Child processes: started, kept running, stopped."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from router.runtime.own_files import open_own

RESTART_S = 0.5
RESTART_MAX_S = 8.0
STEADY_S = 10.0
STOP_S = 15.0
MAX_LINE = 300
"""The limit of the last log line in a report, in characters."""

_PR_SET_PDEATHSIG = 1


class Child:
    """One process, and the log file of its output."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process."""
        return None if self._process is None else self._process.pid

    def last_line(self) -> str:
        """Return the last line of its log, or an empty string."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""

    async def keep_running(self, report: Callable[[str], None]) -> None:
        """Start the process, and restart it whenever it ends, until cancelled; then stop it.

        `report` is called with each end. Restarts in quick succession are delayed with backoff, up
        to `RESTART_MAX_S`.
        """
        delay_s = RESTART_S
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started_s = clock()
                await self._start()
                status = await self._wait()
                delay_s = RESTART_S if clock() - started_s > STEADY_S else delay_s
                last = self.last_line()
                why = f", last line {last[:MAX_LINE]!r}" if last else ""
                report(
                    f"{self.name} {_ending(status)}{why}; retry in {delay_s:g} s ({self.log_path})"
                )
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, RESTART_MAX_S)
        finally:
            await self._stop()

    async def _start(self) -> None:
        log = open_own(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only this process, which stops the children in order.
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        finally:
            os.close(log)

    async def _wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _die_with_parent() -> None:
    """Have the kernel end the child if this process is killed. Runs in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

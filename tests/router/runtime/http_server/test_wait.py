"""Tasks go on inside `go_on`, and can be cancelled as ever."""

import asyncio
from contextvars import ContextVar

import pytest

from router.runtime.http_server.wait import Wait

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


class Waiting:
    """A task that waits, and what became of it."""

    def __init__(self):
        self.wait = Wait(asyncio.get_running_loop())
        self.went_on_as = None
        self.task = asyncio.create_task(self.run())

    async def run(self):
        WHOSE.set("the task's")
        await self.wait
        self.went_on_as = (WHOSE.get(), asyncio.current_task())


async def waiting():
    its = Waiting()
    await asyncio.sleep(0)
    return its


async def in_a_callback(act):
    """As the loop calls it, outside every task."""
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(act()))
    return await done


async def test_a_task_goes_on_at_once_as_itself():
    its = await waiting()

    def release():
        its.wait.go_on()
        return its.went_on_as

    assert await in_a_callback(release) == ("the task's", its.task)
    await its.task


async def test_wait_raises_the_error():
    its = await waiting()
    await in_a_callback(lambda: its.wait.go_on(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await its.task


async def test_result_after_a_cancellation_is_ignored():
    its = await waiting()
    its.task.cancel()
    await in_a_callback(its.wait.go_on)
    with pytest.raises(asyncio.CancelledError):
        await its.task
    assert its.went_on_as is None


async def test_timeout_raises():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await Wait(asyncio.get_running_loop())

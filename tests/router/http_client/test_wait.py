"""Tasks go on inside `go_on`, and can be cancelled as ever."""

import asyncio
from contextvars import ContextVar

import pytest

from router.http_client.wait import Wait

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

    def let_go():
        its.wait.go_on()
        return its.went_on_as

    assert await in_a_callback(let_go) == ("the task's", its.task)
    await its.task


async def test_it_fails_with_what_went_wrong():
    its = await waiting()
    await in_a_callback(lambda: its.wait.go_on(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await its.task


async def test_what_comes_after_a_cancellation_is_too_late():
    its = await waiting()
    its.task.cancel()
    await in_a_callback(its.wait.go_on)
    with pytest.raises(asyncio.CancelledError):
        await its.task
    assert its.went_on_as is None


async def test_patience_ends():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await Wait(asyncio.get_running_loop())

"""Sliced work: the waiting time of everything else, and the order of jobs."""

import asyncio

import pytest

from router.publisher.follower.loop_slices import TURN_S, SliceScheduler

SLICE_S = 0.4 * TURN_S


class Work:
    """Slices that take time on a clock of their own; what else is ready counts the pauses."""

    def __init__(self):
        self.now_s = 0.0
        self.turns = SliceScheduler(lambda: self.now_s)
        self.done = []
        self.pauses = []

    def slices(self, name, count):
        for _ in range(count):
            self.now_s += SLICE_S
            self.done.append(name)
            yield

    async def watch(self):
        """How much was done between one time that others could run and the next."""
        while True:
            before_s = self.now_s
            await asyncio.sleep(0)
            self.pauses.append(self.now_s - before_s)


@pytest.fixture
async def work():
    work = Work()
    watching = asyncio.create_task(work.watch())
    await asyncio.sleep(0)
    yield work
    watching.cancel()
    await asyncio.wait([watching])


async def test_nothing_waits_for_more_than_a_turn_and_a_slice(work):
    await work.turns.carry_out(work.slices("a", 20))
    assert work.done == ["a"] * 20
    assert max(work.pauses) <= TURN_S + SLICE_S


async def test_many_with_little_to_do_share_a_turn(work):
    await asyncio.gather(*(work.turns.carry_out(work.slices(name, 1)) for name in "abcdefghij"))
    assert work.done == list("abcdefghij")
    assert max(work.pauses) <= TURN_S + SLICE_S


async def test_jobs_run_in_order_of_arrival(work):
    await asyncio.gather(*(work.turns.carry_out(work.slices(name, 5)) for name in "ab"))
    assert work.done == list("aaaaabbbbb")


async def test_cancelled_job_keeps_its_rest_and_frees_the_loop(work):
    slices = work.slices("a", 9)
    working = asyncio.create_task(work.turns.carry_out(slices))
    await asyncio.sleep(0)
    working.cancel()
    await asyncio.wait([working])
    assert 0 < len(work.done) < 9
    for _ in slices:
        pass
    await work.turns.carry_out(work.slices("b", 1))
    assert work.done == [*["a"] * 9, "b"]

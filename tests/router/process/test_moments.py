import asyncio

from router.process.moments import next_moment


async def test_whoever_sleeps_wakes_behind_a_multiple_of_the_interval_and_not_before_it():
    loop = asyncio.get_running_loop()

    async def sleep(begin_s, interval_s):
        await asyncio.sleep(begin_s)
        due_s = (loop.time() // interval_s + 1.0) * interval_s
        await next_moment(interval_s)
        assert loop.time() >= due_s

    await asyncio.gather(sleep(0.0, 0.1), sleep(0.01, 0.2), sleep(0.03, 0.1))

import asyncio

from router.process.moments import LATE_S, Standstill, next_moment


async def test_whoever_sleeps_wakes_behind_a_multiple_of_the_interval_and_not_before_it():
    loop = asyncio.get_running_loop()

    async def sleep(begin_s, interval_s):
        await asyncio.sleep(begin_s)
        due_s = (loop.time() // interval_s + 1.0) * interval_s
        await next_moment(interval_s)
        assert loop.time() >= due_s

    await asyncio.gather(sleep(0.0, 0.1), sleep(0.01, 0.2), sleep(0.03, 0.1))


def test_time_in_which_we_stood_still_is_held_against_nobody():
    standstill = Standstill(1.0, 0.0)
    assert [standstill.is_over(number / 5) for number in range(5)] == [True] * 5
    late_s = 0.8 + LATE_S + 0.1
    after = [standstill.is_over(late_s + number / 5) for number in range(8)]
    assert after == [False] * 5 + [True] * 3


def test_whoever_is_always_late_holds_it_against_others_every_other_time():
    standstill = Standstill(0.0, 0.0)
    assert [standstill.is_over(number * 9.0) for number in range(1, 5)] == [False, True] * 2

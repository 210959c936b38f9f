import asyncio

from router.runtime.process.ticks import LATE_S, PauseDetector, next_tick


async def test_next_tick_wakes_after_a_multiple_of_the_interval():
    loop = asyncio.get_running_loop()

    async def wake(begin_s, interval_s):
        await next_tick(begin_s)
        due_s = (loop.time() // interval_s + 1.0) * interval_s
        await next_tick(interval_s)
        assert loop.time() >= due_s

    await asyncio.gather(wake(0.07, 0.1), wake(0.01, 0.2), wake(0.03, 0.1))


def test_silence_during_a_pause_does_not_count():
    standstill = PauseDetector(1.0, 0.0)
    assert [standstill.is_over(number / 5) for number in range(5)] == [True] * 5
    late_s = 0.8 + LATE_S + 0.1
    after = [standstill.is_over(late_s + number / 5) for number in range(8)]
    assert after == [False] * 5 + [True] * 3


def test_constant_lateness_counts_every_second_time():
    standstill = PauseDetector(0.0, 0.0)
    assert [standstill.is_over(number * 9.0) for number in range(1, 5)] == [False, True] * 2

"""Lives, missing batches and reported losses: against an engine and its wire."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.engine_wire import EngineWorld, encode, run_lives
from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.batch_order.replay_schedule import ReplayTimes
from router.publisher.batch_order.steps import Apply, Lost, Replay
from support.chaos.fuzzing import examples

NO_REPLAY = BatchOrderSettings(can_replay=False)


@pytest.fixture
def world():
    return EngineWorld(Random(1))


@pytest.fixture
def blind():
    world = EngineWorld(Random(1), NO_REPLAY)
    world.connect()
    return world


def started(world, count=20):
    """Connected, and with `count` batches followed live."""
    world.quiet()
    world.publish(count)
    world.quiet()
    world.check_equal()
    assert world.applied.lives == 0
    return world


def test_registration_replays_from_the_first_batch(world):
    world.publish(30)
    world.quiet()
    assert world.asked[0] == 0
    world.check_equal()


def test_live_batches_are_applied_as_they_come_once_one_was_confirmed(world):
    started(world)
    asked = len(world.asked)
    world.publish(1000)
    world.deliver(1000)
    world.check_equal()
    assert len(world.asked) == asked


@pytest.mark.parametrize("count", [0, 1, 19, 20, 21, 60])
def test_a_restart_is_noticed_however_many_batches_the_new_life_has(world, count):
    started(world)
    world.restart(count)
    world.quiet()
    assert world.applied.lives == 1
    world.check_equal()
    world.publish(5)
    world.quiet()
    assert world.applied.lives == 1
    world.check_equal()


def test_a_life_that_goes_on_after_a_reconnect_is_not_begun_again(world):
    started(world)
    world.disconnect()
    world.publish(7)
    world.quiet()
    assert world.applied.lives == 0
    world.check_equal()


def test_a_gap_is_filled_by_a_replay(world):
    started(world)
    world.publish(3)
    world.pipe.pop(1)
    world.deliver(2)
    assert world.asked[-1] == 17
    world.quiet()
    assert world.applied.lives == 0
    world.check_equal()


def test_a_lost_last_batch_is_found_by_a_probe(world):
    started(world)
    world.publish()
    world.pipe.clear()
    world.quiet(2.2)
    world.check_equal()


def test_an_idle_engine_is_probed_every_interval(world):
    started(world)
    world.asked.clear()
    world.publish()
    world.deliver()
    world.wait(0.25)
    assert not world.asked
    world.quiet(6.5)
    assert 13 <= len(world.asked) <= 17
    assert world.log.waiting_s(world.now_s) < 0.5


def test_an_idle_restart_behind_an_unbroken_connection_is_found_by_a_probe(world):
    started(world)
    world.life, world.count = 1, 40
    world.quiet(2.2)
    assert world.applied.lives == 1
    world.check_equal()


def test_numbers_that_go_back_on_an_unbroken_connection_are_checked(world):
    started(world)
    world.life, world.count = 1, 0
    world.publish(3)
    world.quiet(1.0)
    world.check_equal()


def test_duplicates_change_nothing(world):
    started(world)
    world.publish(2)
    world.pipe *= 3
    world.quiet()
    world.check_equal()
    assert world.log.counters.duplicates >= 4


def test_history_that_the_buffer_has_no_more_is_lost(world):
    world.buffer = 10
    world.publish(30)
    world.connect()
    world.deliver(9)
    steps = world.log.replayed(20, encode(0, 20), 0.0)
    assert steps[0] == Lost(0, 19, "history: the engine's buffer begins later")
    assert steps[1] == Apply(20, encode(0, 20))


def test_a_buffer_that_begins_behind_the_cursor_says_nothing_about_the_life(world):
    started(world)
    world.disconnect()
    world.buffer = 5
    world.publish(30)
    world.quiet()
    assert (world.applied.lives, world.applied.lost) == (1, 1)
    assert world.applied.batches == [(0, n) for n in range(45, 50)]


@pytest.mark.parametrize("count", [0, 20])
def test_batches_seen_live_are_not_lost_by_a_late_replay(world, count):
    started(world, count)
    world.disconnect()
    world.quiet()
    world.buffer = 5
    world.publish(30)
    world.quiet()
    assert (world.applied.lives, world.applied.lost) == (0, 0)
    world.check_equal()


def test_replays_that_fail_are_repeated_and_then_given_up(world):
    started(world)
    world.publish(3)
    world.pipe.pop(0)
    world.deliver(2)
    for _ in range(5):
        world.fail()
        assert world.applied.lost == 0
        world.wait(1.0)
    world.fail()
    world.wait(0.2)
    assert world.applied.lost == 1
    assert world.applied.batches[-2:] == [(0, 21), (0, 22)]
    assert world.log.waiting_s(world.now_s) > 5.0
    world.publish(1)
    world.deliver()
    assert world.log.waiting_s(world.now_s) == 0.0


def test_abandoned_replay_is_retried_and_completed(world):
    world.publish(3)
    world.connect()
    world.publish(2)
    world.deliver(3)
    for _ in range(6):
        world.fail()
        world.wait(1.0)
    assert world.applied.lost == 1
    world.publish(2)
    world.deliver(9)
    world.wait(30.0)
    world.quiet()
    world.check_equal()


def test_a_restart_in_the_middle_of_a_replay(world):
    world.publish(30)
    world.connect()
    world.deliver(1)
    world.replay(10)
    world.restart(12)
    world.quiet()
    assert world.applied.lives == 1
    world.check_equal()


def test_overflow_during_a_replay_is_requested_again():
    world = EngineWorld(Random(1), BatchOrderSettings(held_batches=5))
    world.publish(3)
    world.connect()
    world.deliver(1)
    world.replay(1)  # The engine answers with what it has now.
    world.publish(20)
    world.deliver(20)
    assert world.log.counters.held_overflows == 15
    world.quiet(1.0)
    world.check_equal()


def test_held_bytes_are_bounded():
    log = BatchOrder(0.0, BatchOrderSettings(held_bytes=10))
    log.connected(0.0)
    log.live(0, b"12345678", 0.0, 0.0)
    log.live(1, b"123", 0.0, 0.0)
    assert log.counters.held_overflows == 1


def test_a_batch_proves_nothing_of_those_still_on_their_way():
    log = BatchOrder(0.0, BatchOrderSettings(can_replay=False))
    log.connected(1.0)
    log.live(0, b"a", 5.0, 4.0)
    assert log.waiting_s(5.0) == 1.0
    log.live(1, b"b", 6.0, 4.0)
    assert log.waiting_s(6.0) == 2.0
    log.live(2, b"c", 7.0, 7.0)
    assert log.waiting_s(7.0) == 0.0


def test_stale_batches_of_the_former_life_are_dropped(world):
    """They lie in our socket while a replay already has the next life."""
    started(world)
    world.publish(2)
    world.life, world.count = 1, 20
    world.log.tick(world.now_s + 2.0)
    world.answer = 16
    world.replay(99)
    world.replay(99)
    assert world.applied.batches == [(1, n) for n in range(20)]
    world.publish(1)
    world.quiet()
    world.check_equal()
    assert world.log.counters.stale == 2


def test_an_answer_that_is_not_in_order_is_a_failure(world):
    started(world)
    world.publish(2)
    world.pipe.pop(0)
    world.deliver()
    world.log.replayed(17, encode(0, 17), world.now_s)
    assert world.log.replayed(19, encode(0, 19), world.now_s) == []
    assert world.log.counters.replay_failures == 1
    world.answer = None
    world.quiet()
    world.check_equal()


def test_late_answers_are_ignored(world):
    started(world)
    now_s = world.now_s
    assert world.log.replayed(99, b"", now_s) == []
    assert world.log.replay_ended(now_s) == []
    assert world.log.replay_failed("late", now_s) == []


def test_an_empty_engine_is_whole_again_after_a_loss(world):
    world.connect()
    world.deliver(1)
    for _ in range(6):
        world.fail()
        world.wait(1.0)
    assert world.applied.lost == 1
    world.restart()
    world.quiet()
    world.check_equal()


def test_resumes_where_the_former_process_stopped(world):
    started(world)
    world.resume()
    world.publish(5)
    world.quiet()
    assert world.asked[-1] >= 16
    assert world.applied.lives == 0
    world.check_equal()


@pytest.mark.parametrize("count", [0, 5, 20, 40])
def test_a_restart_while_the_process_was_away_is_noticed(world, count):
    started(world)
    world.resume()
    world.restart(count)
    world.quiet()
    assert world.applied.lives == 1
    world.check_equal()


def test_keeps_fingerprints_across_a_restart_of_the_process():
    log = BatchOrder(0.0, BatchOrderSettings(fingerprints=4))
    log.connected(0.0)
    for sequence in range(6):
        log.replayed(sequence, b"%d" % sequence, 0.0)
    saved = log.save()
    assert (saved.cursor, len(saved.fingerprints)) == (6, 32)
    again = BatchOrder(0.0, BatchOrderSettings(fingerprints=3), saved)
    assert again.connected(0.0) == [Replay(3)]
    assert again.save().fingerprints == saved.fingerprints[8:]


def test_waiting_counts_from_what_is_first_missing(world):
    assert world.log.waiting_s(3.0) > 3600.0
    world.connect()
    world.deliver()
    assert world.log.waiting_s(3.0) > 3600.0
    started(world)
    assert world.log.waiting_s(world.now_s) < 1.0
    world.publish(1)
    world.deliver()
    assert world.log.waiting_s(world.now_s) == 0.0
    assert world.log.waiting_s(world.now_s + 0.3) == pytest.approx(0.3)
    world.publish(2)
    world.pipe.pop(0)
    world.deliver()
    world.wait(1.0)
    assert world.log.waiting_s(world.now_s) == pytest.approx(1.0)
    world.quiet(1.0)
    world.disconnect()
    world.deliver()
    assert 2.0 <= world.log.waiting_s(world.now_s + 2.0) < 2.6
    world.wait(2.0)
    world.connect()
    world.deliver()
    assert 2.0 <= world.log.waiting_s(world.now_s) < 2.6


def test_without_replay_the_history_is_unknown_until_a_life_begins(blind):
    blind.deliver()
    assert blind.applied.lost == 1
    blind.publish(5)
    blind.quiet()
    blind.check_equal()


def test_without_replay_a_reconnect_is_read_as_a_new_life_with_losses(blind):
    blind.publish(5)
    blind.quiet()
    blind.disconnect()
    blind.publish(1)
    blind.connect()
    blind.publish(2)
    blind.quiet()
    assert (blind.applied.lives, blind.applied.lost) == (2, 1)
    assert blind.applied.batches == [(0, 6), (0, 7)]


def test_without_replay_a_batch_behind_a_gap_proves_nothing(blind):
    blind.publish(5)
    blind.deliver(5)
    blind.wait(2.0)
    blind.publish(2)
    blind.pipe.pop(0)
    blind.deliver()
    assert blind.log.waiting_s(blind.now_s) == pytest.approx(2.0)


def test_without_replay_a_gap_is_lost_after_a_moment(blind):
    blind.publish(5)
    blind.pipe.pop(3)
    blind.deliver(5)
    assert blind.applied.batches == [(0, 0), (0, 1)]
    assert blind.log.waiting_s(blind.now_s + 0.05) == pytest.approx(0.05)
    blind.wait(0.1)
    assert blind.applied.lost == 1
    assert blind.applied.batches[2:] == [(0, 3), (0, 4)]


def test_without_replay_a_late_batch_is_waited_for(blind):
    blind.publish(5)
    blind.pipe[2], blind.pipe[4] = blind.pipe[4], blind.pipe[2]
    blind.quiet()
    blind.check_equal()


def test_without_replay_buffered_batches_are_bounded():
    world = EngineWorld(Random(1), BatchOrderSettings(can_replay=False, reorder_batches=3))
    world.connect()
    world.publish(6)
    world.pipe.pop(2)
    world.deliver(9)
    assert world.applied.lost == 1
    assert world.applied.batches[-1] == (0, 5)


def test_without_replay_numbers_that_go_back_are_a_new_life(blind):
    blind.publish(5)
    blind.quiet()
    blind.life, blind.count = 1, 2
    blind.publish(1)
    blind.quiet()
    assert (blind.applied.lives, blind.applied.lost) == (2, 1)
    assert blind.applied.batches == [(1, 2)]


def test_payloads_without_a_time_are_one_life_if_they_are_equal():
    log = BatchOrder(0.0, BatchOrderSettings())
    log.connected(0.0)
    for sequence in range(3):
        log.replayed(sequence, b"same", 0.0)
    log.replay_ended(0.0)
    log.disconnected(1.0)
    log.connected(1.0)
    steps = [step for n in range(5) for step in log.replayed(n, b"same", 1.0)]
    assert steps == [Apply(3, b"same"), Apply(4, b"same")]


seeds = st.integers(0, 2**32)


@settings(max_examples=examples(150))
@given(seeds, st.sampled_from([20, 100, 300]))
def test_random_lives_end_exact_or_with_a_reported_loss(seed, steps):
    random = Random(seed)
    log_settings = BatchOrderSettings(
        can_replay=random.random() < 0.7,
        fingerprints=random.choice([5, 20, 10_000]),
        overlap_batches=random.choice([1, 4]),
        held_batches=random.choice([2, 10, 1000]),
        replay_times=ReplayTimes(retry_given_up_s=random.choice([1.0, 30.0])),
    )
    run_lives(seed, steps, log_settings, buffer=random.choice([1, 3, 20, 10_000])).check_settled()


@settings(max_examples=examples(150))
@given(seeds, st.sampled_from([20, 100, 300]), st.booleans())
def test_nothing_is_lost_where_replays_answer_from_a_buffer_that_is_large_enough(
    seed, steps, early_events
):
    world = run_lives(seed, steps, failures=False, early_events=early_events)
    world.check_equal()

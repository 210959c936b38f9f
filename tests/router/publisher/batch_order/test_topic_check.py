"""A connection that delivers nothing differs from an idle engine, and from one lost message."""

from router.publisher.batch_order.topic_check import TopicCheck


def probed(unheard, cursors):
    """A replay each; between them the engine published up to there."""
    for before, after in cursors:
        unheard.replay_requested(before)
        unheard.replay_ended(after)
    return unheard.problem("vk")


def test_an_idle_engine_is_no_problem():
    assert probed(TopicCheck(), [(0, 50), *[(50, 50)] * 9]) is None


def test_a_lost_message_is_no_problem():
    assert probed(TopicCheck(), [(0, 50), (50, 51), (51, 51), (51, 51), (51, 52), (52, 52)]) is None


def test_missing_live_batches_are_a_problem():
    unheard = TopicCheck()
    unheard.replayed(b"kv@w1")
    problem = probed(unheard, [(0, 50), (50, 51), (51, 60), (60, 61)])
    assert "'vk'" in problem
    assert "'kv@w1'" in problem


def test_a_live_batch_or_a_new_connection_ends_it():
    unheard = TopicCheck()
    assert probed(unheard, [(0, 1), (1, 2), (2, 3), (3, 4)])
    unheard.live()
    assert unheard.problem("vk") is None
    assert probed(unheard, [(4, 5), (5, 6), (6, 7)])
    unheard.connected()
    assert probed(unheard, [(7, 8), (8, 9), (9, 10)]) is None

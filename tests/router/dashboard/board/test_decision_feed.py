import pytest

from router.core.commands import Select
from router.dashboard.board.decision_feed import (
    BURST,
    CANDIDATES,
    KEPT,
    PER_S,
    UNWATCHED_PER_S,
    WAITING,
    DecisionFeed,
)
from router.protocol.requests import RankTarget, SelectRequest
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

PROMPT = [*range(40)]


@pytest.fixture
def world():
    world = World()
    for worker_id in range(1, 13):
        world.worker(worker_id)
    world.cache(rank(3), PROMPT)
    return world


def decided(world, **fields):
    request = SelectRequest(token_ids=PROMPT, **fields)
    return request, world.core.handle(Select(request, prepare(request, ())), 0.0)[0]


def watched():
    feed = DecisionFeed()
    feed.watch(is_watched=True)
    return feed


def test_shown_decision_is_explained_on_demand(world):
    feed = DecisionFeed()
    feed.take("select_and_reserve", *decided(world, request_id="r"), 0.0, 1_000.0)
    seen = feed.explain_next(world.core, 0.0)
    assert (seen.number, seen.is_booked, seen.decision.at) == (1, True, 1_000.0)
    assert (seen.decision.worker_id, seen.decision.request_id) == (3, "r")
    assert (len(seen.decision.shown), seen.decision.candidates) == (CANDIDATES, 12)
    assert feed.explain_next(world.core, 0.0) is None
    assert list(feed.kept) == [seen]
    assert feed.prefixes.decisions == 1


def test_pinned_selection_is_not_shown_as_a_decision(world):
    feed, pinned = watched(), {"pinned_worker": RankTarget(3)}
    feed.take("select", *decided(world, **pinned), 0.0, 0.0)
    assert feed.explain_next(world.core, 0.0) is None
    assert (feed.skipped, feed.predicted) == (0, {})
    feed.take("select_and_reserve", *decided(world, **pinned), 0.0, 0.0)
    assert feed.explain_next(world.core, 0.0).is_booked


def test_explained_decisions_are_limited_per_second_and_per_burst(world):
    feed, made = watched(), decided(world)
    for step in range(1_000):
        feed.take("select", *made, step * 0.01, 0.0)
        if step % 50 == 0:
            while feed.explain_next(world.core, 0.0):
                pass
    assert feed.number == pytest.approx(10 * PER_S, abs=PER_S + 1)
    before = feed.number
    for step in range(100):
        feed.take("select", *made, 100.0 + step, 0.0)
    while feed.explain_next(world.core, 0.0):
        pass
    assert feed.number - before == WAITING
    assert feed.number + feed.skipped == pytest.approx(1_100, abs=WAITING)
    assert len(feed.kept) <= KEPT


def test_every_decision_counts_for_what_was_predicted(world):
    feed, made = watched(), decided(world)
    for _ in range(5):
        feed.take("select", *made, 0.0, 0.0)
    # the engine computes at least a token, so the last of ten blocks is no hit
    assert feed.take_predicted(rank(3)) == [200, 5 * 36]
    assert feed.take_predicted(rank(3)) == [0, 0]


def test_decisions_are_remembered_without_a_viewer(world):
    feed, made = DecisionFeed(), decided(world)
    for step in range(10_000):  # ten a second
        feed.take("select", *made, step * 0.1, 0.0)
        while feed.explain_next(world.core, 0.0):
            pass
    assert feed.number == pytest.approx(1_000 * UNWATCHED_PER_S, abs=WAITING)
    assert len(feed.kept) == KEPT
    assert feed.predicted == {}


def test_unwatched_feed_names_the_time_for_which_it_wants_no_decision(world):
    feed, made = DecisionFeed(), decided(world)
    rests_s = [feed.take("select", *made, 100.0, 0.0) for _ in range(BURST + 1)]
    assert rests_s[:BURST] == [0.0] * BURST
    assert 0 < rests_s[-1] <= 1 / UNWATCHED_PER_S
    feed.watch(is_watched=True)
    assert {feed.take("select", *made, 100.0, 0.0) for _ in range(100)} == {0.0}


def test_sampling_for_viewers_begins_and_ends_at_once(world):
    feed, made = DecisionFeed(), decided(world)
    feed.take("select", *made, 0.0, 0.0)
    assert feed.explain_next(world.core, 0.0) is not None
    feed.take("select", *made, 1.0, 0.0)
    assert feed.explain_next(world.core, 0.0) is None
    feed.watch(is_watched=True)
    feed.take("select", *made, 1.0, 0.0)
    assert feed.explain_next(world.core, 0.0) is not None
    feed.watch(is_watched=False)
    assert feed.predicted == {}

"""How old what the index shows can be."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.indexer.rank_index import Staleness


@pytest.fixture
def freshness():
    return Staleness()


def test_nothing_is_proven_at_first(freshness):
    assert freshness.fresh_at_s(100) == -inf


def test_a_report_proves_what_the_index_shows_already(freshness):
    freshness.note(event_id=5, fresh_at_s=3.0, cursor=5)
    assert freshness.fresh_at_s(5) == 3.0
    assert freshness.fresh_at_s(9) == 3.0


def test_a_report_ahead_of_the_index_proves_it_once_it_has_come_so_far(freshness):
    freshness.note(event_id=5, fresh_at_s=3.0, cursor=4)
    assert freshness.fresh_at_s(4) == -inf
    assert freshness.fresh_at_s(5) == 3.0


def test_reports_that_are_always_ahead_prove_it_in_the_end(freshness):
    for event_id in range(1, 50):
        freshness.note(event_id, event_id / 10, cursor=event_id - 1)
        assert freshness.fresh_at_s(event_id) == event_id / 10


def test_an_older_report_does_not_take_back_what_a_newer_one_proved(freshness):
    freshness.note(5, 3.0, cursor=5)
    freshness.note(4, 2.0, cursor=5)
    assert (freshness.fresh_at_s(5), freshness.reported_event_id) == (3.0, 5)


def test_a_new_life_proves_nothing(freshness):
    freshness.note(5, 3.0, cursor=5)
    freshness.forget()
    assert (freshness.fresh_at_s(5), freshness.reported_event_id) == (-inf, 0)


facts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(0, 3)), max_size=20)


@given(facts)
def test_never_claims_more_than_some_report_proves(steps):
    """For every claim there is a report that proves it, and the index stands behind it."""
    freshness, noted, cursor = Staleness(), [], 0
    for event_id, fresh_at_s, advance in steps:
        freshness.note(event_id, fresh_at_s, cursor)
        noted.append((event_id, fresh_at_s))
        cursor += advance
        claim = freshness.fresh_at_s(cursor)
        assert claim == -inf or any(e <= cursor and claim == a for e, a in noted)

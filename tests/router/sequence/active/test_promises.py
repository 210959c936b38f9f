"""Promises of booked requests: what becomes of them, and what is learned from them."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.values import Rank, Scope
from router.sequence.active.promises import (
    REFUSED_AT_MOST,
    LearnedRatio,
    Promise,
    Promises,
)
from router.sequence.rank_table import PROMISED_TOKENS_PER_S, RankTable

SCOPE, RANK = Scope("m", "g"), Rank(1, 0)


@pytest.fixture
def promises():
    table = RankTable()
    table.add(RANK)
    return Promises(table)


def promise(ttft_s=1.0, tpot_s=0.05, **fields):
    return Promise(SCOPE, "chat", ttft_s, tpot_s, **fields)


def outcome(promises):
    ((key, totals),) = promises.totals.items()
    assert key == (SCOPE, "chat")
    assert not promises.live
    return dict(totals)


@pytest.mark.parametrize(
    ("first_s", "end_s", "tokens", "found"),
    [
        (0.9, 1.4, 11, "met"),
        (1.1, 1.6, 11, "missed_ttft"),
        (0.9, 1.6, 11, "missed_tpot"),
        (1.1, 2.0, 11, "missed_both"),
        (0.9, 9.0, 1, "met"),  # there is no second token
        (0.9, 1.4, None, "unknown"),
        (1.1, 1.4, None, "missed_ttft"),
        (None, 1.4, 11, "unknown"),
        (None, 0.4, 11, "met"),  # as a whole it took less
        (None, 0.9, 11, "unknown"),
    ],
)
def test_a_request_is_judged_by_the_reports_of_its_caller(promises, first_s, end_s, tokens, found):
    promises.give("a", RANK, promise(), 0.0)
    if first_s is not None:
        promises.first_token("a", first_s)
        promises.first_token("a", first_s + 5)  # reported again
    promises.end("a", end_s, tokens)
    assert outcome(promises) == {found: 1}


def test_time_in_the_queue_counts_towards_the_first_token(promises):
    promises.give("a", RANK, promise(tpot_s=inf, waited_s=0.5), 10.0)
    promises.first_token("a", 10.6)
    promises.end("a", 11.0, None)
    assert outcome(promises) == {"missed_ttft": 1}


def test_a_booking_that_ends_otherwise_is_not_known(promises):
    promises.give("a", RANK, promise(), 0.0)
    promises.drop("a")
    promises.drop("never given")
    assert outcome(promises) == {"unknown": 1}


@given(st.lists(st.tuples(st.floats(0.001, 10), st.booleans()), max_size=20), st.data())
def test_a_rank_shows_the_tokens_per_second_that_it_promised(wanted, data):
    table = RankTable()
    table.add(RANK)
    promises = Promises(table)
    for number, (tpot_s, is_expected) in enumerate(wanted):
        promises.give(str(number), RANK, promise(tpot_s=tpot_s, is_expected=is_expected), 0.0)
        promises.check_invariants()
    for number in data.draw(st.permutations(range(len(wanted)))):
        promises.drop(str(number))
        promises.check_invariants()
    assert table.row(RANK)[PROMISED_TOKENS_PER_S] == 0.0


def test_refusals_in_a_row_end_with_a_trial(promises):
    for _ in range(REFUSED_AT_MOST):
        assert not promises.is_trial_due(SCOPE)
        promises.refuse(SCOPE, "chat")
    assert promises.is_trial_due(SCOPE)
    promises.give("a", RANK, promise(), 0.0)
    assert not promises.is_trial_due(SCOPE)


def test_predictions_are_learned_from_if_they_may_decide(promises):
    for predicted_s, likely in ((0.1, 1.0), (0.5, pytest.approx(2.0, rel=0.1))):
        for number in range(400):
            name = f"{predicted_s} {number}"
            given = Promise(SCOPE, "chat", 1.0, inf, ttft_s=predicted_s)
            promises.give(name, RANK, given, 0.0)
            promises.first_token(name, 2 * predicted_s)
            promises.end(name, 2 * predicted_s, None)
        assert promises.errors(SCOPE).ttft.likely == likely


@given(st.lists(st.floats(0, 1e9), max_size=300))
def test_learned_ratios_stay_within_bounds_and_in_order(ratios):
    learned = LearnedRatio()
    for each in ratios:
        learned.note(each)
        assert 0.2 < learned.likely <= learned.high < 10
    if not ratios:
        assert learned.likely == learned.high == 1.0


def test_half_of_the_requests_exceed_the_likely_ratio_and_a_fifth_the_high_one():
    learned, ratios = LearnedRatio(), [0.5 + number / 100 for number in range(100)]
    for turn in range(40):
        for number in range(100):
            learned.note(ratios[(number * 37 + turn) % 100])
    assert sum(each > learned.likely for each in ratios) == pytest.approx(50, abs=10)
    assert sum(each > learned.high for each in ratios) == pytest.approx(20, abs=8)

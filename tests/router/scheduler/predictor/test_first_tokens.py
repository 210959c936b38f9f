"""Which first tokens tell how fast an engine is."""

import pytest

from router.scheduler.predictor.first_tokens import (
    ALONE_ERROR,
    GUARDED,
    LEAST_ERROR,
    OF_EACH,
    WAIT_S,
    FirstTokens,
)
from router.sequence.active.tracker import FirstToken


def token(waited_s=1.0, tokens=1_500.0):
    return FirstToken(waited_s, tokens, tokens * tokens / 2, 0.0, 0.0)


def warm(tokens=1_500.0):
    first_tokens = FirstTokens()
    first_tokens.restart(GUARDED)
    first_tokens.add(token(tokens=tokens), 1.0, 0.0)  # the first of its decade
    return first_tokens


def test_the_fastest_of_ten_counts():
    first_tokens = warm()
    for ratio in (1.4, 1.2, 0.9, 3.0, 1.1, 1.0, 2.0, 1.5, 1.3):
        first_tokens.add(token(waited_s=ratio), ratio, 1.0)
        assert first_tokens.take(1.0) == []
    first_tokens.add(token(waited_s=5.0), 5.0, 1.0)
    (fastest,) = first_tokens.take(1.0)
    assert fastest.token.waited_s == 0.9
    assert fastest.error == pytest.approx(LEAST_ERROR, rel=0.01)
    assert first_tokens.take(100.0) == []


def test_lengths_are_not_compared_with_each_other():
    first_tokens = warm()
    for number in range(2 * OF_EACH - 1):
        tokens = 1_500.0 if number % 2 else 9_000.0
        first_tokens.add(token(tokens=tokens), 1.0, 0.0)
    assert [each.token.tokens for each in first_tokens.take(1.0)] == [9_000.0]


def test_few_prompts_count_after_a_while_with_a_larger_error():
    first_tokens = warm()
    first_tokens.add(token(), 1.0, 1.0)
    assert first_tokens.take(WAIT_S + 0.9) == []
    (fastest,) = first_tokens.take(WAIT_S + 1.0)
    assert fastest.error == pytest.approx(ALONE_ERROR, rel=0.01)


def test_short_times_have_a_larger_error():
    """Their report comes a few milliseconds late."""
    first_tokens = warm()
    first_tokens.add(token(waited_s=0.01), 1.0, 0.0)
    (fastest,) = first_tokens.take(WAIT_S)
    assert fastest.error > 0.5


def test_the_first_of_a_life_do_not_count():
    first_tokens = FirstTokens()
    for _ in range(GUARDED):
        first_tokens.add(token(), 1.0, 0.0)
    assert first_tokens.take(WAIT_S) == []
    first_tokens.add(token(), 1.0, 0.0)
    assert len(first_tokens.take(WAIT_S)) == 1


def test_an_engine_that_finished_requests_is_past_them():
    first_tokens = FirstTokens()
    first_tokens.restart(GUARDED - 2)
    for _ in range(3):
        first_tokens.add(token(), 1.0, 0.0)
    assert len(first_tokens.take(WAIT_S)) == 1


def test_a_length_counts_once_another_of_its_decade_was_seen():
    first_tokens = warm(tokens=1_500.0)
    first_tokens.add(token(tokens=20.0), 1.0, 0.0)
    assert first_tokens.take(WAIT_S) == []
    first_tokens.add(token(tokens=30.0), 1.0, 0.0)
    assert [each.token.tokens for each in first_tokens.take(WAIT_S)] == [30.0]


def test_a_new_life_begins_anew():
    first_tokens = warm()
    first_tokens.add(token(), 1.0, 0.0)
    first_tokens.restart(0)
    assert first_tokens.take(WAIT_S) == []

"""What tenants were given of late."""

from math import inf, log

import pytest

from router.scheduler.fair_share import HALF_LIFE_S, FairShares


def test_what_was_given_weighs_half_after_every_half_life():
    shares = FairShares()
    shares.charge("a", 1000, 5.0)
    assert shares.tokens("a", 5.0) == pytest.approx(1000)
    assert shares.tokens("a", 5.0 + 3 * HALF_LIFE_S) == pytest.approx(125)
    shares.charge("a", 300, 5.0 + HALF_LIFE_S)
    assert shares.tokens("a", 5.0 + HALF_LIFE_S) == pytest.approx(800)


def test_the_level_orders_tenants_at_any_time():
    shares = FairShares()
    assert shares.level("new") == -inf
    shares.charge("early", 1000, 0.0)
    shares.charge("late", 600, HALF_LIFE_S)
    assert shares.level("early") < shares.level("late")
    shares.charge("early", 101, HALF_LIFE_S)
    assert shares.level("early") > shares.level("late")


def test_neither_time_nor_tokens_overflow():
    shares = FairShares()
    for now_s in (0.0, 1e3, 1e9):
        shares.charge("a", 1 << 40, now_s)
    assert shares.tokens("a", 1e9) == pytest.approx(1 << 40)


def test_the_rate_is_that_of_late():
    shares = FairShares()
    for step in range(2000):
        shares.charge("ab"[step % 2], 50, step * 0.1)
    assert shares.tokens_per_s(200.0) == pytest.approx(500, rel=0.01)
    assert shares.tokens_per_s(200.0 + HALF_LIFE_S) == pytest.approx(250, rel=0.01)
    assert FairShares().tokens_per_s(0.0) == 0.0
    assert shares.tokens("a", 200.0) == pytest.approx(250 * HALF_LIFE_S / log(2), rel=0.01)


def test_those_who_were_given_least_are_forgotten_when_there_are_too_many():
    shares = FairShares(max_tenants=2)
    for index, tenant in enumerate("abcd"):
        shares.charge(tenant, 100 * (index + 1), 0.0)
    shares.forget(kept="")
    assert shares.level("a") > -inf
    shares.charge("e", 1000, 0.0)
    shares.forget(kept="a")
    assert [tenant for tenant in "abcde" if shares.level(tenant) > -inf] == ["a", "d", "e"]

"""What tenants, and the ids within them, were given of late."""

from math import inf, log

import pytest

from router.scheduler.queue.fair_shares import HALF_LIFE_S, MOST_IDS, FairShares, SharesWithin


def test_service_weighs_half_after_each_half_life():
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


def given(**tokens):
    shares = FairShares()
    for tenant, count in tokens.items():
        shares.charge(tenant, count, 1e6)
    return {tenant for tenant in [*tokens, "new"] if shares.is_above(tenant)}


def test_equal_shares_are_not_above():
    assert given(a=700) == set()
    assert given(a=700, b=700) == set()
    assert given(a=700, b=700, c=700, d=700, e=700, f=700, g=700) == set()


def test_above_is_a_tenant_with_more_than_its_share():
    """10 and 1: (100 + 1) / 11 = 9.2. 5, 3, 3 and 1: 44 / 12 = 3.7. 5, 4 and 4: 57 / 13 = 4.4."""
    assert given(a=10, b=1) == {"a"}
    assert given(a=5, b=3, c=3, d=1) == {"a"}
    assert given(a=5, b=4, c=4) == {"a"}


def test_tenant_is_no_longer_above_once_others_catch_up():
    shares = FairShares()
    shares.charge("a", 1000, 0.0)
    shares.charge("b", 100, 0.0)
    assert shares.is_above("a")
    shares.charge("b", 400, HALF_LIFE_S)
    assert not shares.is_above("b")
    shares.charge("b", 150, HALF_LIFE_S)
    assert (shares.is_above("a"), shares.is_above("b")) == (False, True)


def test_tenants_with_the_least_service_are_forgotten_first():
    shares = FairShares(max_tenants=2)
    for index, tenant in enumerate("abcd"):
        shares.charge(tenant, 100 * (index + 1), 0.0)
    shares.forget(kept="")
    assert shares.level("a") > -inf
    shares.charge("e", 1000, 0.0)
    shares.forget(kept="a")
    assert [tenant for tenant in "abcde" if shares.level(tenant) > -inf] == ["a", "d", "e"]


def test_ids_that_a_tenant_invents_make_no_other_tenant_forget_its_own():
    within = SharesWithin()
    within.charge("quiet", "id", 10, 0.0, ())
    for index in range(3 * MOST_IDS):
        within.charge("loud", f"id {index}", 1000 + index, 0.0, ())
    assert within.level("quiet", "id") > -inf
    remembered = [within.level("loud", f"id {index}") > -inf for index in range(3 * MOST_IDS)]
    assert MOST_IDS <= sum(remembered) <= 2 * MOST_IDS
    within.drop(["quiet"])
    assert within.level("quiet", "id") == -inf


def test_a_tenant_without_ids_is_not_recorded():
    within = SharesWithin()
    within.charge("plain", "", 10, 0.0, ())
    assert within.level("plain", "") == -inf
    within.charge("plain", "id", 10, 0.0, ())
    within.charge("plain", "", 10, 0.0, ())
    assert within.level("plain", "") > -inf

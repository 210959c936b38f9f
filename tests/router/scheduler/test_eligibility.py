"""Adapters that ranks have loaded, beside lists of all that was ever asked."""

from hypothesis import given
from hypothesis import strategies as st

from router.scheduler.eligibility import LoadedLoras
from support.values.builders import rank

RANKS = [rank(1), rank(1, 1), rank(2)]
ASKED = st.lists(st.tuples(st.sampled_from(RANKS), st.sampled_from("abcd")))


def last(names, capacity):
    """The last distinct ones."""
    return list(dict.fromkeys(reversed(names)))[:capacity]


@given(ASKED, st.integers(1, 3))
def test_rank_keeps_its_latest_adapters(asked, capacity):
    adapters = LoadedLoras()
    for each, name in asked:
        adapters.note(each, name, capacity)
        adapters.check_invariants()
    for name in "abcd":
        expected = [name in last([n for r, n in asked if r == each], capacity) for each in RANKS]
        assert adapters.having(RANKS, name).tolist() == expected


def test_removed_rank_has_no_adapters():
    adapters = LoadedLoras()
    adapters.note(RANKS[0], "a", 2)
    adapters.drop(RANKS[0])
    assert not adapters.having(RANKS, "a").any()

"""The digest of a set follows its changes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.sequence.hashing._digest import digest

hashes = st.sets(st.integers(0, 2**64 - 1), max_size=20)


def array(values):
    return np.array(list(values), dtype=np.uint64)


def test_digest_of_nothing_is_zero():
    assert digest(array([])) == 0


@given(hashes, hashes)
def test_digest_changes_by_the_digest_of_the_change(before, after):
    changed = before ^ after
    assert digest(array(before)) ^ digest(array(changed)) == digest(array(after))


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=20), st.randoms())
def test_digest_does_not_depend_on_order(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert digest(array(values)) == digest(array(shuffled))


def test_regular_hashes_do_not_cancel_out():
    assert digest(array([1, 2, 3])) != 0
    assert len({digest(array([i, i ^ 1])) for i in range(0, 1000, 2)}) == 500


def test_digest_is_the_published_one():
    """Routers and agents of different versions compare digests."""
    assert digest(array([0])) == 16294208416658607535
    assert digest(array([2**64 - 1])) == 16490336266968443936

"""The answer of a search, as a mapping."""

import numpy as np
import pytest

from router.indexer.base import NO_OVERLAP, Overlap
from router.indexer.radix_tree.matches import Matches
from router.protocol.values import Rank

A, B, C = Rank(1, 0), Rank(1, 1), Rank(2, 0)
ROWS = np.array([[2, 1, 2, 3, 4], [0, 5, 5, 5, 6]], "<u4")


@pytest.fixture
def matches():
    return Matches((A, B, C), ROWS.tobytes())


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_each_rank_has_its_overlap_however_often_it_is_asked_for(matches, asked):
    for _ in range(asked):
        assert matches.get(C, NO_OVERLAP) == Overlap(1, 2, 3, 4)
    assert matches.get(A, NO_OVERLAP) == Overlap(5, 5, 5, 6)
    assert matches.get(B, NO_OVERLAP) is NO_OVERLAP


def test_lookup_of_one_rank_builds_no_other_overlaps(matches):
    matches.get(C, NO_OVERLAP)
    assert matches.by_rank is None


def test_matches_read_as_a_mapping(matches):
    everything = {C: Overlap(1, 2, 3, 4), A: Overlap(5, 5, 5, 6)}
    assert dict(matches.items()) == everything
    assert (set(matches), len(matches), matches[C]) == ({A, C}, 2, everything[C])
    assert (A in matches, B in matches) == (True, False)

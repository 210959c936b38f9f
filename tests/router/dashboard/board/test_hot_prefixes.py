from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.dashboard.board.hot_prefixes import HotPrefixes, depths
from router.protocol.values import Scope

SCOPE = Scope("m", "g")


def path(*names):
    """Hashes of a prompt's blocks: each is of all that came before."""
    return np.array([abs(hash(names[: i + 1])) for i in range(len(names))], np.uint64)


def test_lengths_that_a_match_counts_for():
    assert depths(0) == []
    assert depths(1) == [1]
    assert depths(37) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 37]
    assert len(depths(1 << 20)) < 50


def test_a_prefix_is_shown_as_long_as_nearly_all_share_it():
    prefixes = HotPrefixes()
    for number in range(10):
        tail = [f"{number}.{i}" for i in range(8)]
        prefixes.note(SCOPE, path(*"abcdefgh", *tail), 16, 4)
    shown = prefixes.top(5)
    assert [(each.blocks, each.count, each.tokens) for each in shown] == [(8, 10, 32)]
    assert shown[0].sequence_hash == f"{int(path(*'abcdefgh')[-1]):016x}"
    assert (shown[0].model_name, prefixes.decisions) == ("m", 10)


def test_only_matched_blocks_count():
    prefixes = HotPrefixes()
    for _ in range(3):
        prefixes.note(SCOPE, path(*"abcd"), 0, 4)
    assert (prefixes.top(5), len(prefixes), prefixes.decisions) == ([], 0, 3)


def test_prefixes_are_ordered_by_saved_tokens():
    prefixes = HotPrefixes()
    for _ in range(9):
        prefixes.note(SCOPE, path("x"), 1, 4)
    for _ in range(3):
        prefixes.note(SCOPE, path(*"abcdefgh"), 8, 4)
    assert [(each.blocks, each.count) for each in prefixes.top(5)] == [(8, 3), (1, 9)]
    assert len(prefixes.top(1)) == 1


def test_prefix_names_the_shown_one_that_it_begins_with():
    prefixes = HotPrefixes()
    for _ in range(9):
        prefixes.note(SCOPE, path(*"abcd"), 4, 4)
    for _ in range(3):
        prefixes.note(SCOPE, path(*"abcdefghijklmnop"), 16, 4)
    shorter = f"{int(path(*'abcd')[-1]):016x}"
    shown = {each.blocks: each.within for each in prefixes.top(5)}
    assert shown == {4: None, 16: shorter}
    assert [each.within for each in prefixes.top(1)] == [None]


def test_unused_prefixes_fade():
    prefixes = HotPrefixes()
    for _ in range(5):
        prefixes.note(SCOPE, path("a"), 1, 4)
    prefixes.fade()
    assert [each.count for each in prefixes.top(5)] == [2]
    prefixes.fade()
    prefixes.fade()
    assert len(prefixes) == 0


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 8))
def test_counts_are_within_their_stated_error(names, capacity):
    prefixes = HotPrefixes(capacity)
    for name in names:
        prefixes.note(SCOPE, path(name), 1, 4)
    truth = Counter(f"{int(path(name)[0]):016x}" for name in names)
    assert len(prefixes) <= capacity
    for each in prefixes.top(capacity):
        assert each.count - each.excess <= truth[each.sequence_hash] <= each.count

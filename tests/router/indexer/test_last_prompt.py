"""The prompt that named a block last, against a dictionary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.indexer.last_prompt import LastPromptIndex

# Few, so that they are named again and again; the last ones share a home slot with the first.
blocks = st.sampled_from([*range(40), 2**64 - 1, *(each << 40 for each in range(1, 24))])
prompts = st.lists(blocks, max_size=30)
steps = st.lists(st.tuples(st.booleans(), prompts), max_size=12)


def array(hashes):
    return np.array(hashes, dtype=np.uint64)


def assert_same(latest, expected):
    assert len(latest) == len(expected)
    assert sorted(latest.blocks().tolist()) == sorted(expected)
    assert latest.serials() == sorted(set(expected.values()))
    known = array(list(expected))
    assert latest.of(known).tolist() == list(expected.values())


@given(steps)
def test_last_prompt_equals_a_dictionary(taken):
    latest, expected = LastPromptIndex(), {}
    for serial, (is_named, hashes) in enumerate(taken, 1):
        each_once = list(dict.fromkeys(hashes))
        if is_named:
            named = latest.name(array(hashes), serial)
            before = [expected[each] for each in each_once if each in expected]
            assert named.blocks.tolist() == each_once
            assert named.new_blocks == len(each_once) - len(before)
            assert [run[0] for run in named.superseded for _ in range(run[1])] == before
            expected |= dict.fromkeys(each_once, serial)
        else:
            gone = [each for each in each_once if each in expected]
            latest.forget(array(gone))
            for each in gone:
                del expected[each]
        assert_same(latest, expected)
        assert latest.of(array([99, 2**63])).tolist() == [0, 0]


def test_last_prompt_table_grows():
    latest = LastPromptIndex()
    for serial in range(1, 101):
        latest.name(np.arange(serial * 50, serial * 50 + 100, dtype=np.uint64), serial)
    assert len(latest) == 5_050
    assert latest.of(array([50, 99, 100, 5_099])).tolist() == [1, 1, 2, 100]


def test_blocks_are_forgotten_while_the_table_grows():
    latest, expected, random = LastPromptIndex(), {}, np.random.default_rng(3)
    for serial in range(1, 401):
        hashes = random.integers(1, 2**63, 20, dtype=np.uint64)
        latest.name(hashes, serial)
        expected |= dict.fromkeys(hashes.tolist(), serial)
        gone = random.choice(array(list(expected)), 4, replace=False)
        latest.forget(gone)
        for each in gone.tolist():
            del expected[each]
        if serial % 20 == 0:
            assert_same(latest, expected)


def test_returned_prompts_are_copies():
    latest, prompt = LastPromptIndex(), array([1, 2])
    named = latest.name(prompt, 1)
    prompt[:] = 7
    assert named.blocks.tolist() == [1, 2]

"""The cost of blocks that an engine reports again, in operations."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from router.protocol.values import SCHEME, Identity
from router.publisher.hybrid import class_blocks, placing
from router.publisher.hybrid.placing import BlockNames
from support.engines.engines import Edge, batch, stored

SIZE = 4
WINDOW = {"group": 1, "spec_kind": "sliding_window", "sliding_window_tokens": 5}
FILES = (class_blocks.__file__, placing.__file__)


def operations(call):
    """The lines that a call runs in the modules of class blocks; those of loops each time."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def prompt(first, blocks):
    """The hashes and tokens of a prompt like no other."""
    return list(range(first, first + blocks)), [first] * (SIZE * blocks)


def full(hashes, tokens):
    return stored(hashes, tokens, spec_kind="full_attention")


def report_after(prompts):
    """The operations of a full report, by an engine that holds this many prompts."""
    edge = Edge(Identity(SCHEME, SIZE))
    for each in range(prompts):
        hashes, tokens = prompt(1_000_000 + 10 * each, 2)
        edge.normalizer.apply(
            batch(stored(hashes[-1:], tokens, **WINDOW), full(hashes, tokens)), edge.now_s
        )
    hashes, tokens = prompt(1, 4)
    edge.feed(stored(hashes[-1:], tokens, **WINDOW), full(hashes, tokens))
    again = batch(stored(hashes, tokens, **WINDOW), full(hashes, tokens))
    count = operations(lambda: edge.normalizer.apply(again, edge.now_s))
    assert "reported again" in edge.journal.hybrid.layout.problem
    return count


def test_a_report_costs_the_same_however_many_blocks_are_held():
    assert report_after(400) == report_after(4)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3))))
def test_names_are_found_in_both_directions(changes):
    names, expected = BlockNames(), {}
    for engine_hash, name in changes:
        if name is None:
            names.forget((engine_hash,))
            expected.pop(engine_hash, None)
        else:
            names.update({engine_hash: name})
            expected[engine_hash] = name
        assert names.by_hash == expected
        for each in range(4):
            found = names.hash_of(each)
            assert found is None or expected[found] == each
    assert BlockNames(expected).by_hash == expected

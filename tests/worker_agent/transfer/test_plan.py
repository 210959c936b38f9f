"""Copies are checked whole: what is refused, by which rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.plan import Copies, checked_copies


def checked(sources, targets, *, is_same_memory=False):
    return checked_copies(
        sources, targets, source_blocks=4, target_blocks=3, is_same_memory=is_same_memory
    )


@pytest.mark.parametrize(
    ("sources", "targets", "is_same_memory", "rule", "said"),
    [
        ([], [], False, "no_blocks_provided", "sources: none"),
        ([1], [0, 1], False, "count_mismatch", "1 sources, 2 targets"),
        ([4], [0], False, "block_out_of_range", r"sources: 4 \(allowed: 0 to 3\)"),
        ([0], [3], False, "block_out_of_range", r"targets: 3 \(allowed: 0 to 2\)"),
        ([0], [-1], False, "block_out_of_range", "targets: -1"),
        ([0, 1], [2, 2], False, "duplicate_destination_blocks", "targets: 2 twice"),
        ([0, 1], [1, 2], True, "overlapping", "1 is a source, too"),
    ],
)
def test_invalid_plans_are_refused(sources, targets, is_same_memory, rule, said):
    with pytest.raises(TransferError, match=said) as refused:
        checked(sources, targets, is_same_memory=is_same_memory)
    assert refused.value.rule == rule


def test_a_source_may_go_to_several_and_another_memory_may_use_the_same_numbers():
    assert checked([0, 0], [0, 1]) == Copies((0, 0), (0, 1))


blocks = st.lists(st.integers(-1, 4), max_size=4)


@given(blocks, blocks, st.booleans())
def test_agrees_with_the_definition(sources, targets, is_same_memory):
    is_fit = (
        0 < len(sources) == len(targets) == len(set(targets))
        and all(0 <= block < 4 for block in sources)
        and all(0 <= block < 3 for block in targets)
        and not (is_same_memory and set(sources) & set(targets))
    )
    try:
        copies = checked(sources, targets, is_same_memory=is_same_memory)
    except TransferError:
        assert not is_fit
    else:
        assert is_fit
        assert len(copies) == len(targets)

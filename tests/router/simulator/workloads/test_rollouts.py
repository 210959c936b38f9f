from itertools import groupby
from operator import attrgetter
from random import Random

import msgspec
import pytest

from router.simulator.workloads.rollouts import Rollouts


def groups_of(trace):
    return [list(each) for _, each in groupby(trace.requests, attrgetter("session"))]


def test_prompts_of_a_group_are_equal_and_groups_share_nothing():
    groups = groups_of(Rollouts(groups=5, prompts=8).trace(512, Random(1)))
    assert [len(group) for group in groups] == [8] * 5
    for group in groups:
        assert len({tuple(each.sequence_hashes) for each in group}) == 1
        assert len({each.osl_tokens for each in group}) > 1
        assert 16_000 <= group[0].isl_tokens <= 32_000
    assert len({group[0].sequence_hashes[0] for group in groups}) == 5


def test_a_group_begins_when_the_one_before_it_in_its_lane_has_ended():
    workload = Rollouts(groups=5, prompts=2, at_once=2, stagger_s=3.0, pause_s=1.0)
    first, second, third, *_, last = groups_of(workload.trace(512, Random(1)))
    assert [(each.arrival_s, each.after) for each in first + second] == [
        (0.0, ()), (0.0, ()), (3.0, ()), (3.0, ())
    ]  # fmt: skip
    assert {(each.after, each.think_s) for each in third} == {((0, 1), 1.0)}
    assert {each.after for each in last} == {(4, 5)}


def test_lengths_in_the_wrong_order_are_refused():
    with pytest.raises(msgspec.ValidationError, match="least_prompt_tokens is 40000"):
        msgspec.convert({"least_prompt_tokens": 40_000}, Rollouts)

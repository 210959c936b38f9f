"""Requests that are reported in batches, as far as they should have grown since. All by hand."""

import pytest

from router.core.commands import Free, OutputBlock, PrefillComplete, Select
from router.protocol.requests import SelectRequest
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.prompt import prepare
from router.sequence.rank_table import (
    BASE_S,
    DECODE_BLOCKS,
    DECODING_KV_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_SHARE,
)
from support.values.builders import World, rank

RATES = [0.006, 0.0, 0.0, 0.002, 0.0]
"""Of an engine that makes a step in 6 ms, and 2 ms longer for each request."""


def world_of(**fields):
    world = World(**fields)
    world.worker(1, agent_is_engine=False)
    world.core.ranks.row(rank(1))[BASE_S : BASE_S + 5] = RATES
    world.core.ranks.row(rank(1))[OUTPUT_TOKENS] = 0.0
    return world


def book(world, request_id, tokens, now_s, first=0):
    world.book(request_id, list(range(first, first + tokens)), now_s)


def weighed(world, now_s):
    """KV tokens and blocks of the only candidate, as a decision sees them."""
    request = SelectRequest(token_ids=[1])
    row = world.core.handle(Select(request, prepare(request, ())), now_s)[0].choice.table.values[0]
    world.core.tracker.check_invariants()
    return tuple(round(float(each), 6) for each in row[[DECODING_KV_TOKENS, DECODE_BLOCKS]])


def decoding(**fields):
    """A prompt of 100 tokens, 25 blocks, which decodes from 10 s on: a token in 8 ms."""
    world = world_of(**fields)
    book(world, "a", 100, 9.0)
    world.core.handle(PrefillComplete("a", in_batch=True), 10.0)
    return world


def test_between_two_batches_a_request_grows_by_a_token_a_step():
    world = decoding()
    assert [weighed(world, now_s) for now_s in (10.0, 10.08, 10.32)] == [
        (100, 25),
        (110, 27.5),
        (140, 35),
    ]


def test_reported_progress_replaces_the_estimate_and_grows_on():
    world = decoding()
    for _ in range(11):  # one block more than was expected
        world.core.handle(OutputBlock("a", None, in_batch=True), 10.32)
    assert [weighed(world, now_s) for now_s in (10.32, 10.4)] == [(144, 36), (154, 38.5)]


def test_requests_grow_from_their_last_report_and_slow_each_other():
    world = decoding()
    book(world, "b", 40, 10.0, first=5000)
    world.core.handle(PrefillComplete("b", in_batch=True), 10.4)
    # Two requests, 10 ms a token: 50 of one and 10 of the other; 25 + 10 blocks are booked.
    assert weighed(world, 10.5) == (140 + 60, 35 + 15)
    world.core.handle(Free("a"), 10.5)
    assert weighed(world, 10.56) == (40 + 20, 10 + 5)
    world.core.handle(Free("b"), 10.6)
    assert weighed(world, 11.0) == (0, 0)


def test_engines_that_compute_prompts_too_generate_less():
    world = decoding()
    world.core.ranks.row(rank(1))[PREFILL_SHARE] = 0.5
    assert weighed(world, 10.32) == (120, 30)


def test_silent_rank_is_expected_to_grow_as_usual():
    world = decoding()
    world.core.ranks.row(rank(1))[OUTPUT_TOKENS] = 60.0
    assert weighed(world, 40.0) == (160, 40)


def test_unbatched_progress_is_taken_as_reported():
    world = world_of()
    book(world, "a", 100, 9.0)
    world.core.handle(PrefillComplete("a"), 10.0)
    world.core.handle(OutputBlock("a", None), 10.0)
    assert weighed(world, 11.0) == (104, 26)


def test_without_output_tracking_growth_affects_the_engine_only():
    world = decoding(tracking=TrackedParts(output_blocks=False))
    assert weighed(world, 10.08) == (110, 25)


@pytest.mark.parametrize("request_id", ["a", "b"])
def test_a_prompt_that_is_still_being_computed_does_not_grow(request_id):
    world = world_of()
    book(world, request_id, 100, 9.0)
    world.core.handle(OutputBlock(request_id, None, in_batch=True), 10.0)
    assert weighed(world, 12.0) == (0, 26)

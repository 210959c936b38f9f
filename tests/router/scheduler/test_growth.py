"""Requests that are reported in batches, as far as they should have grown since. All by hand."""

import pytest

from builders import World, rank
from router.protocol.requests import SelectRequest
from router.sequence.prompt import prepare
from router.sequence.rank_table import (
    BASE_S,
    DECODE_BLOCKS,
    DECODING_KV_TOKENS,
    OUTPUT_TOKENS,
    PREFILL_SHARE,
)
from router.sequence.tracking import Tracking

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
    row = world.core.select(request, prepare(request, ()), now_s).choice.table.values[0]
    world.core.tracker.check_invariants()
    return tuple(round(float(each), 6) for each in row[[DECODING_KV_TOKENS, DECODE_BLOCKS]])


def decoding(**fields):
    """A prompt of 100 tokens, 25 blocks, which decodes from 10 s on: a token in 8 ms."""
    world = world_of(**fields)
    book(world, "a", 100, 9.0)
    world.core.prefill_complete("a", 10.0, in_batch=True)
    return world


def test_between_two_batches_a_request_grows_by_a_token_a_step():
    world = decoding()
    assert [weighed(world, now_s) for now_s in (10.0, 10.08, 10.32)] == [
        (100, 25),
        (110, 27.5),
        (140, 35),
    ]


def test_a_batch_says_what_is_true_and_from_there_it_grows_on():
    world = decoding()
    for _ in range(11):  # one block more than was expected
        world.core.output_block("a", None, 10.32, in_batch=True)
    assert [weighed(world, now_s) for now_s in (10.32, 10.4)] == [(144, 36), (154, 38.5)]


def test_requests_grow_each_from_when_it_was_spoken_of_and_slow_each_other():
    world = decoding()
    book(world, "b", 40, 10.0, first=5000)
    world.core.prefill_complete("b", 10.4, in_batch=True)
    # Two requests, 10 ms a token: 50 of one and 10 of the other; 25 + 10 blocks are booked.
    assert weighed(world, 10.5) == (140 + 60, 35 + 15)
    world.core.free("a", 10.5)
    assert weighed(world, 10.56) == (40 + 20, 10 + 5)
    world.core.free("b", 10.6)
    assert weighed(world, 11.0) == (0, 0)
    assert not world.core.tracker.growing


def test_engines_that_compute_prompts_too_generate_less():
    world = decoding()
    world.core.ranks.row(rank(1))[PREFILL_SHARE] = 0.5
    assert weighed(world, 10.32) == (120, 30)


def test_who_is_silent_for_long_is_expected_to_have_grown_as_usual():
    world = decoding()
    world.core.ranks.row(rank(1))[OUTPUT_TOKENS] = 60.0
    assert weighed(world, 40.0) == (160, 40)


def test_what_is_said_at_once_is_taken_as_it_is_said():
    world = world_of()
    book(world, "a", 100, 9.0)
    world.core.prefill_complete("a", 10.0)
    world.core.output_block("a", None, 10.0)
    assert weighed(world, 11.0) == (104, 26)


def test_where_output_is_not_counted_only_the_engine_reads_it():
    world = decoding(tracking=Tracking(output_blocks=False))
    assert weighed(world, 10.08) == (110, 25)


@pytest.mark.parametrize("request_id", ["a", "b"])
def test_a_prompt_that_is_still_being_computed_does_not_grow(request_id):
    world = world_of()
    book(world, request_id, 100, 9.0)
    world.core.output_block(request_id, None, 10.0, in_batch=True)
    assert weighed(world, 12.0) == (0, 26)

"""What a placement costs, in seconds: the README's example, and what each part depends on."""

from collections import Counter
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.scheduler._herd_kernel import RECEIVED
from router.scheduler.herd import ALONE, ExpectedLoad
from router.scheduler.policy import _predicted_parts as kernel
from router.scheduler.policy.predictive import Predictive, predicted_parts
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import (
    CACHED_BLOCKS,
    COLUMNS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
)
from router.sequence import rank_table as ranks
from support.values.terms import candidate, table

SETTINGS = PolicySettings()

EXAMPLE = {
    ranks.BLOCK_SIZE: 16,
    ranks.CAPACITY_BLOCKS: 10_000,
    ranks.HELD_BLOCKS: 9_900,
    ranks.TRUST_WEIGHT: 1,
    ranks.QUEUED_TOKENS: 4_000,
    ranks.QUEUED_CONTEXTS: 8e6,
    ranks.HEAD_TOKENS: 4_000,
    ranks.HEAD_CONTEXTS: 8e6,
    ranks.HEAD_SINCE_S: 99.8,
    ranks.DECODE_BLOCKS: 6_500,
    ranks.REQUESTS: 9,
    ranks.DECODING_REQUESTS: 8,
    ranks.DECODING_KV_TOKENS: 100_000,
    ranks.BASE_S: 0.02,
    ranks.PREFILL_S: 0.0001,
    ranks.CONTEXT_S: 2e-9,
    ranks.DECODE_S: 0.0002,
    ranks.KV_S: 2e-8,
    ranks.CHUNK_TOKENS: 2_008,
    ranks.REQUESTS_PER_S: 0.5,
    ranks.PREFILL_SHARE: 0.5,
    ranks.OUTPUT_TOKENS: 100,
    ranks.REUSE: 0.5,
    OVERLAP_DEVICE: 500,
    OVERLAP_HOST: 500,
    OVERLAP_DISK: 500,
    OVERLAP_REMOTE: 500,
    CACHED_BLOCKS: 500,
    NEW_BLOCKS: 1e9,  # nothing of it is booked
}
"""One rank, and a prompt of 10,000 tokens of which it holds 8,000."""


def row(changes=None):
    made = candidate()
    for column, value in {**EXAMPLE, **(changes or {})}.items():
        made[column] = value
    return made


def asked(*rows, isl_tokens=10_000, expected=None):
    made = table(*rows, isl_tokens=isl_tokens)
    return replace(made, now_s=100.0, expected_output_tokens=expected)


def parts(changes=None, settings=SETTINGS, **request):
    return predicted_parts(asked(row(changes), **request), settings)[0]


def cost(changes=None, **request):
    return float(parts(changes, **request)[kernel.COST_S])


def test_the_worked_example():
    example = parts()
    assert example[kernel.QUEUE_S] == pytest.approx(0.275)
    assert example[kernel.ROOM_S] == 0
    assert example[kernel.PREFILL_OWN_S] == pytest.approx(0.2596)
    assert example[kernel.STREAM_S] == pytest.approx(2.4001)
    assert example[kernel.DELAY_S] == pytest.approx(2.56773)
    assert example[kernel.FUTURE_S] == pytest.approx(0.05254304 + 0.275 / 30)
    assert example[kernel.PUSHED_S] == pytest.approx(0.025)
    assert example[kernel.COST_S] == pytest.approx(1.08642604 + 0.275 / 30)


def test_a_prompt_that_began_long_ago_is_as_good_as_done():
    assert parts({ranks.HEAD_SINCE_S: 0.0})[kernel.QUEUE_S] == pytest.approx(0)


def test_only_the_oldest_prompt_has_begun():
    behind = {ranks.HEAD_SINCE_S: 0.0, ranks.QUEUED_TOKENS: 5_000}
    assert parts(behind)[kernel.QUEUE_S] == pytest.approx(1_000 * 0.0001)


SHORT = {ranks.QUEUED_TOKENS: 300, ranks.QUEUED_CONTEXTS: 0, ranks.HEAD_TOKENS: 300}
SHORT |= {ranks.HEAD_CONTEXTS: 0, CACHED_BLOCKS: 612.5}
"""A prompt of 300 tokens is there, and one of 200 comes."""


def first_token_s(changes):
    made = parts(changes)
    return made[kernel.QUEUE_S] + made[kernel.PREFILL_OWN_S]


def test_a_step_that_has_not_begun_is_shared():
    own_s = 200 * 0.0001 + 200 * 9_900 * 2e-9
    just_now = {**SHORT, ranks.HEAD_SINCE_S: 100.0}
    assert first_token_s(just_now) == pytest.approx(0.0118 + 300 * 0.0001 + own_s + 0.0236)


def test_a_step_that_has_begun_cannot_be_joined():
    own_s = 200 * 0.0001 + 200 * 9_900 * 2e-9
    begun = {**SHORT, ranks.HEAD_SINCE_S: 99.97}
    left_s = 0.0118 + 0.0236 + 300 * 0.0001 - 0.03
    assert first_token_s(begun) == pytest.approx(left_s + own_s + 0.0236)


def test_a_step_takes_what_fits_and_a_token_more_takes_another():
    free = {ranks.QUEUED_TOKENS: 0, ranks.QUEUED_CONTEXTS: 0, ranks.HEAD_TOKENS: 0}
    fits = parts(free)[kernel.PREFILL_OWN_S]
    more = parts(free, isl_tokens=10_001)[kernel.PREFILL_OWN_S]
    assert more - fits == pytest.approx(0.0236, rel=0.02)


def test_among_decoding_requests_alone_half_a_step_is_left_on_average():
    decoding = {ranks.QUEUED_TOKENS: 0, ranks.QUEUED_CONTEXTS: 0, ranks.HEAD_TOKENS: 0}
    assert parts(decoding)[kernel.QUEUE_S] == pytest.approx(0.0236 / 2)
    nobody = {**decoding, ranks.DECODING_REQUESTS: 0, ranks.DECODING_KV_TOKENS: 0}
    assert parts(nobody)[kernel.QUEUE_S] == 0


def test_foreign_requests_count_like_our_bookings():
    more = {ranks.FOREIGN_TOKENS: 1_000, ranks.FOREIGN_REQUESTS: 1}
    assert parts(more)[kernel.QUEUE_S] > parts()[kernel.QUEUE_S] + 0.1
    assert parts(more)[kernel.DELAY_S] == pytest.approx(2.56773 * 10 / 9)


def test_untrusted_overlap_saves_less():
    assert parts({ranks.TRUST_WEIGHT: 0})[kernel.PREFILL_OWN_S] == pytest.approx(
        10_000 * 0.0001 + 10_000 * 5_000 * 2e-9 + 5 * 0.0236
    )
    costs = [cost({ranks.TRUST_WEIGHT: weight}) for weight in (1.0, 0.5, 0.0)]
    assert costs == sorted(costs)


def test_slower_tiers_save_a_part_of_what_they_have_beyond_faster_ones():
    lower = {OVERLAP_HOST: 540, OVERLAP_DISK: 580, OVERLAP_REMOTE: 600}
    saved = 16 * (500 + 0.75 * 40 + 0.25 * 40)
    assert parts(lower)[kernel.PREFILL_OWN_S] == pytest.approx(
        parts({CACHED_BLOCKS: saved / 16})[kernel.PREFILL_OWN_S]
    )


def test_at_least_one_token_is_computed():
    whole = parts({CACHED_BLOCKS: 625})
    assert whole[kernel.PREFILL_OWN_S] == pytest.approx(0.0236 + 0.0001, rel=1e-3)


def test_decode_worker_has_no_prefill_cost():
    assert parts({ranks.DECODE_SIDE: 1})[kernel.PREFILL_OWN_S] == pytest.approx(0.0236)
    assert parts({ranks.DECODE_SIDE: 1, ranks.REUSE: 0})[kernel.FUTURE_S] == 0


def test_waits_for_room_where_requests_do_not_fit():
    full = parts({ranks.DECODE_BLOCKS: 9_900})
    booked = 9_900 + 9 * 100 / 16
    lacking = booked + 131.25 - 10_000
    assert full[kernel.ROOM_S] == pytest.approx(lacking / min(booked, 10_000) * 100 * 0.0236 / 0.5)
    assert parts({ranks.DECODE_BLOCKS: np.nan})[kernel.ROOM_S] == 0


def test_pushes_nothing_out_of_a_cache_with_space_or_of_unknown_size():
    assert parts({ranks.HELD_BLOCKS: 9_000})[kernel.PUSHED_S] == 0
    assert parts({ranks.CAPACITY_BLOCKS: 0})[kernel.PUSHED_S] == 0
    assert parts({ranks.HELD_BLOCKS: 99_999})[kernel.PUSHED_S] == pytest.approx(131.25 * 16 * 5e-5)


def test_the_caller_may_know_how_long_the_answer_is():
    assert parts(expected=200)[kernel.STREAM_S] == pytest.approx(
        200 * (0.0236 + 0.0002 + 10_100 * 2e-8)
    )


def test_unknown_output_length_follows_the_busiest_ranks():
    busy, idle = row(), row({ranks.REQUESTS_PER_S: 0, ranks.OUTPUT_TOKENS: 9_999})
    both = predicted_parts(asked(busy, idle), SETTINGS)
    assert both[0, kernel.STREAM_S] == pytest.approx(parts()[kernel.STREAM_S])


def delay_s(reuse, *cached_blocks):
    rows = [row({ranks.REUSE: reuse, CACHED_BLOCKS: each}) for each in cached_blocks]
    return predicted_parts(asked(*rows), SETTINGS)[0, kernel.DELAY_S]


def test_where_prompts_are_used_again_a_delay_comes_back_with_each_follower():
    assert delay_s(0, 500, 0) == pytest.approx(2.4849)
    assert delay_s(3, 500, 0) == pytest.approx((1 + 3 / 3 * (1 - 4_000 / 10_000)) * 2.4849)


def test_equal_overlap_everywhere_adds_no_delay():
    assert delay_s(3, 625, 625) == pytest.approx(delay_s(0, 625, 625))


def test_eviction_costs_use_the_reuse_rate_of_all_ranks():
    wanted, unwanted = row({ranks.REUSE: 3}), row({ranks.REUSE: 0})
    both = predicted_parts(asked(wanted, unwanted), SETTINGS)[:, kernel.PUSHED_S]
    assert both.tolist() == pytest.approx([0.075, 0.075])


def test_a_new_rank_and_a_taint_multiply():
    assert cost({ranks.SLOW_UNTIL_S: 130}) == pytest.approx(2 * cost())
    assert cost({ranks.SLOW_UNTIL_S: 115}) == pytest.approx(1.5 * cost())
    assert cost({ranks.SLOW_UNTIL_S: 99}) == cost()


columns = st.lists(st.floats(0, 1e6), min_size=COLUMNS, max_size=COLUMNS)


@given(columns, st.integers(1, 200_000), st.one_of(st.none(), st.integers(0, 100_000)))
def test_every_part_is_a_number_and_no_time_is_negative(values, isl_tokens, expected):
    values[ranks.PREFILL_SHARE] = min(values[ranks.PREFILL_SHARE], 0.9)
    values[ranks.BLOCK_SIZE] = 16
    made = asked(np.array(values), isl_tokens=isl_tokens, expected=expected)
    found = predicted_parts(made, SETTINGS)
    assert np.isfinite(found).all()


@given(st.floats(0, 50), st.floats(0, 50))
def test_more_requests_there_never_cost_less(few, more):
    assert cost({ranks.REQUESTS: few}) <= cost({ranks.REQUESTS: few + more})


def tried(bursts, passed):
    """The part by which the cost of the second of two ranks is lowered."""
    rows = row({ranks.PLACED_AT: passed}), row({ranks.BURSTS: bursts})
    costs = Predictive().score(asked(*rows), SETTINGS)
    return 1 - costs[1] / costs[0]


def test_a_rank_that_is_passed_over_costs_less_until_it_is_measured():
    assert [tried(0, passed) for passed in (0, 19, 38, 500)] == pytest.approx([0, 0.5, 1, 1])
    assert [tried(bursts, 19) for bursts in (1, 2, 3)] == pytest.approx([0.5**1.5, 0.5**3, 0])
    assert tried(2, 38) == 1
    assert tried(3, 500) == 0


def chosen(*rows, claims=ALONE, **settings):
    rng, of = Random(3), replace(asked(*rows), claims=claims)
    made = PolicySettings(**settings)
    return Counter(Predictive().choose(of, made, rng).index for _ in range(300))


def test_cheapest_rank_is_chosen_when_certain():
    longer = row({ranks.QUEUED_TOKENS: 4_100})
    assert chosen(longer, row()) == {1: 300}


UNSURE = {ranks.RELATIVE_ERROR: 0.05}
NEAR = row({**UNSURE, ranks.QUEUED_TOKENS: 4_100})
FAR = row({**UNSURE, ranks.QUEUED_TOKENS: 9_000})


def test_beside_other_routers_draws_among_indistinguishable_ranks():
    idle_router = ExpectedLoad(np.zeros(RECEIVED + 1), ALONE.ours)
    counted = chosen(FAR, row(UNSURE), NEAR, claims=idle_router)
    assert set(counted) == {1, 2}
    assert min(counted.values()) > 100


def test_alone_takes_the_best_and_any_that_costs_exactly_as_much():
    counted = chosen(FAR, row(UNSURE), NEAR, row(UNSURE))
    assert set(counted) == {1, 3}
    assert min(counted.values()) > 100


def test_future_delay_grows_with_the_prefill_share_of_all_ranks():
    tried = (0, 0.5, 0.8)
    future = {
        share: parts({ranks.PREFILL_SHARE: share, ranks.REUSE: 0})[kernel.FUTURE_S]
        for share in tried
    }
    assert future[0] == 0
    assert future[0.8] == pytest.approx(4 * future[0.5])


def test_prompt_behind_which_few_requests_come_delays_fewer():
    rates = (2.0, 2.0, 2.0, 0.1)
    table = asked(*(row({ranks.REQUESTS_PER_S: rate, ranks.REUSE: 0}) for rate in rates))
    future = predicted_parts(table, SETTINGS)[:, kernel.FUTURE_S]
    assert future[0] == future[1] == future[2]
    assert future[0] * 0.1 / 2 < future[3] < future[0] * 0.5


def test_rates_that_differ_by_chance_count_as_equal():
    rates = (2.0, 1.6, 2.2, 1.9)
    table = asked(*(row({ranks.REQUESTS_PER_S: rate, ranks.REUSE: 0}) for rate in rates))
    future = predicted_parts(table, SETTINGS)[:, kernel.FUTURE_S]
    assert future == pytest.approx(future[0])


@given(st.lists(st.floats(0, 1_000), min_size=1, max_size=12))
def test_own_rates_change_no_mean_and_no_order(rates):
    table = asked(*(row({ranks.REQUESTS_PER_S: rate, ranks.REUSE: 0}) for rate in rates))
    future = predicted_parts(table, SETTINGS)[:, kernel.FUTURE_S]
    of_mean = parts({ranks.REQUESTS_PER_S: np.mean(rates), ranks.REUSE: 0})[kernel.FUTURE_S]
    assert np.mean(future) == pytest.approx(of_mean)
    assert (future >= 0).all()
    for (rate, one), (other_rate, other) in combinations(zip(rates, future, strict=True), 2):
        assert (rate - other_rate) * (one - other) >= -1e-9 * of_mean * max(rates)


@pytest.mark.parametrize(("reuse", "followers"), [(0, 0), (3, 0.2), (10, 2 / 3), (30, 1)])
def test_next_request_that_is_bound_here_waits_here_too(reuse, followers):
    """A later one is placed anew."""
    of_this = parts({ranks.REUSE: reuse, ranks.PREFILL_SHARE: 0})
    assert of_this[kernel.FUTURE_S] == pytest.approx(followers * of_this[kernel.QUEUE_S])


FREE = {CACHED_BLOCKS: 0, ranks.REQUESTS: 0, ranks.REUSE: 0}
BUSY = {CACHED_BLOCKS: 0, ranks.REUSE: 0}
SIBLING = {CACHED_BLOCKS: 0, NEW_BLOCKS: 1, ranks.REUSE: 0}
"""A prompt of which 9,984 tokens are booked there, and none are cached."""


def beside(*others):
    """The parts on a free rank."""
    return predicted_parts(asked(row(FREE), *map(row, others)), SETTINGS)[0]


def test_computing_for_a_sibling_again_is_dearer_the_more_ranks_have_work():
    """Groups do not spread over ranks that happen to be free, as single requests do."""
    usual = beside(BUSY, BUSY)[kernel.FUTURE_S]
    assert beside(SIBLING, BUSY)[kernel.FUTURE_S] == pytest.approx(
        usual * (0.5 + 0.5 * 0.9984 / 2) / 0.5
    )
    assert beside(SIBLING, BUSY, BUSY, BUSY)[kernel.FUTURE_S] == pytest.approx(
        usual * (0.5 + 0.5 * 0.9984 * 3 / 4) / 0.5
    )


def test_on_a_fleet_that_only_computes_for_a_sibling_its_computation_is_not_dearer():
    assert beside(SIBLING, FREE)[kernel.FUTURE_S] == beside(BUSY, FREE)[kernel.FUTURE_S]


def test_a_prefix_that_is_cached_is_not_of_a_sibling():
    held = {**SIBLING, CACHED_BLOCKS: 624}
    assert beside(held, BUSY)[kernel.FUTURE_S] == beside(BUSY, BUSY)[kernel.FUTURE_S]


def test_followers_of_a_sibling_are_not_of_this_request():
    there = [row({**SIBLING, ranks.REUSE: reuse}) for reuse in (0, 3)]
    rows = [row({**BUSY, ranks.REUSE: reuse}) for reuse in (0, 3)]
    alone, followed = (
        predicted_parts(asked(*pair), SETTINGS)[1, kernel.DELAY_S]
        for pair in zip(there, rows, strict=True)
    )
    assert followed == pytest.approx((1 + 3 / 3 * (1 - 0.9984)) * alone)


def test_a_temperature_draws_from_all():
    far = row({ranks.QUEUED_TOKENS: 9_000})
    assert set(chosen(far, row(), router_temperature=5.0)) == {0, 1}


def test_a_second_after_the_first_token_counts_a_tenth():
    found = parts()
    first = found[kernel.QUEUE_S] + found[kernel.PREFILL_OWN_S] + found[kernel.FUTURE_S]
    late = found[kernel.STREAM_S] + found[kernel.DELAY_S] + found[kernel.PUSHED_S]
    for weight in (0.0, 0.1, 1.0):
        settings = PolicySettings(delay_weight=weight)
        assert cost(settings=settings) == pytest.approx(first + weight * late)

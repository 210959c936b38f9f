"""Dynamo's costs, by hand, and its rules for equal ones."""

import json
from collections import Counter
from math import exp, nan, tanh
from pathlib import Path
from random import Random

import pytest

from router.scheduler.policy.dynamo import Dynamo10, Dynamo16
from router.scheduler.settings import PolicySettings
from support.values.terms import candidate, table

VECTORS = json.loads((Path(__file__).parents[3] / "vectors/dynamo_1_6_costs.json").read_text())
"""Costs that `SelectionService` of ai-dynamo-runtime 1.6.1 logged of what it chose, and what it
chose among: `preferred_weight` is that of the candidate's taint; it takes its workers for decoders.
"""


def costs(policy, *rows, isl_tokens=160, **settings):
    return policy.score(table(*rows, isl_tokens=isl_tokens), PolicySettings(**settings)).tolist()


def chosen(policy, *rows, draws=3000, **settings):
    rng, of = Random(3), table(*rows)
    return Counter(policy.choose(of, PolicySettings(**settings), rng).index for _ in range(draws))


# ── dynamo-1.0 ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "isl_tokens", "weight", "cost"),
    [
        (candidate(new_blocks=10), 160, 1.0, 160 / 16 + 10),
        (candidate(new_blocks=10), 160, 2.0, 2 * 10 + 10),
        (candidate(overlap=8, decode_blocks=1, new_blocks=2), 168, 1.0, 40 / 16 + 3),
        (candidate(overlap=10, decode_blocks=7), 160, 1.0, 0 + 7),
        (candidate(decode_blocks=10), 160, 0.0, 10),
        (candidate(prefill_tokens=80), 160, 1.0, 80 / 16 + 10),
        (candidate(block_size=32, prefill_tokens=32), 96, 1.0, 1 + 3),
        # 2,385 tokens, 133 blocks of 16 cached, 161 tokens and 16 blocks of others booked
        (
            candidate(overlap=133, prefill_tokens=161, decode_blocks=16, new_blocks=150),
            2385,
            1.0,
            26.125 + 166,
        ),
    ],
)
def test_1_0_adds_prefill_and_decode_blocks(row, isl_tokens, weight, cost):
    assert costs(Dynamo10(), row, isl_tokens=isl_tokens, prefill_load_scale=weight) == [cost]


def test_1_0_overlap_beyond_the_prompt_saves_no_more_than_the_prompt():
    assert costs(Dynamo10(), candidate(overlap=99, prefill_tokens=32)) == [2]


def test_1_0_unknown_decode_blocks_are_the_prefill_blocks_rounded_down():
    unknown = candidate(decode_blocks=nan, overlap=5)
    assert costs(Dynamo10(), unknown, isl_tokens=168, prefill_load_scale=2.0) == [2 * 5.5 + 5]


def test_1_0_looks_at_the_device_tier_alone():
    one, two = candidate(overlap=(2,)), candidate(overlap=(2, 4, 6, 8))
    assert costs(Dynamo10(), one) == costs(Dynamo10(), two) == [8]


def test_1_0_equal_costs_go_to_the_smallest_cache():
    rows = [candidate(held=5), candidate(held=4), candidate(held=9)]
    assert chosen(Dynamo10(), *rows) == {1: 3000}


def test_1_0_equal_caches_are_drawn_from():
    counts = chosen(Dynamo10(), candidate(held=4), candidate(held=4), candidate(held=9))
    assert counts.keys() == {0, 1}
    assert abs(counts[0] - 1500) < 150


def test_1_0_temperature_draws_from_all():
    counts = chosen(
        Dynamo10(), candidate(), candidate(decode_blocks=8), router_temperature=1.0, draws=20_000
    )
    assert counts[1] / 20_000 == pytest.approx(exp(-1) / (1 + exp(-1)), abs=0.015)


def test_1_0_the_weight_trades_cached_prefix_for_load():
    rows = [candidate(overlap=10, decode_blocks=30), candidate(decode_blocks=10)]
    assert chosen(Dynamo10(), *rows, prefill_load_scale=1.0) == {1: 3000}
    assert chosen(Dynamo10(), *rows, prefill_load_scale=3.0) == {0: 3000}


# ── dynamo-1.6 ──────────────────────────────────────────────────────────────────────────────────


def test_1_6_without_lower_tiers_is_1_0_where_the_overlap_is_within_the_work():
    rows = [candidate(overlap=3, prefill_tokens=40, decode_blocks=7, new_blocks=2)]
    assert costs(Dynamo16(), *rows) == costs(Dynamo10(), *rows) == [(40 + 160) / 16 - 3 + 9]


@pytest.mark.parametrize(
    ("overlap", "credit"),
    [
        ((4,), 4.0),
        ((4, 6), 4 + 0.75 * 2),
        ((4, 6, 10), 4 + 0.75 * 2 + 0.25 * 4),
        ((0, 6, 6), 0.75 * 6),
        ((0, 0, 8), 0.25 * 8),
        ((4, 6, 6, 9), 4 + 0.75 * 2),  # the shared cache has no credit until it is switched on
    ],
)
def test_1_6_a_slower_tier_is_credited_for_what_extends_the_faster_one(overlap, credit):
    assert costs(Dynamo16(), candidate(overlap)) == [10 - credit]


def test_1_6_every_credit_can_be_set():
    assert costs(
        Dynamo16(),
        candidate((2, 4, 6, 9)),
        overlap_score_credit=0.5,
        host_cache_hit_weight=0.1,
        disk_cache_hit_weight=1.0,
        shared_cache_multiplier=0.25,
    ) == [10 - (0.5 * 2 + 0.1 * 2 + 1.0 * 2 + 0.25 * 3)]


def test_1_6_credit_saves_no_more_than_there_is_to_do():
    assert costs(Dynamo16(), candidate(10, decode_blocks=3), overlap_score_credit=2.0) == [3]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["cost"]))
def test_1_6_costs_are_those_of_the_real_one(vector):
    rows = [
        candidate(
            each["overlap"],
            taint=exp(-tanh(each["preferred_weight"])),
            decode_side=1,
            **{name: each[name] for name in ("prefill_tokens", "decode_blocks", "requests")},
            new_blocks=each["new_blocks"],
        )
        for each in vector["candidates"]
    ]
    isl_tokens, settings = vector["isl_tokens"], vector["settings"]
    every = costs(Dynamo16(), *rows, isl_tokens=isl_tokens, **settings)
    assert min(every) == vector["cost"]  # to the last bit
    assert vector["candidates"][every.index(min(every))]["worker_id"] == vector["chosen"]


def test_the_real_ones_costs_go_through_every_term():
    settings = [vector["settings"] for vector in VECTORS]
    assert {name for each in settings for name in each} == {
        "host_cache_hit_weight",
        "disk_cache_hit_weight",
        "decode_active_request_weight",
        "overlap_score_credit",
        "overlap_score_credit_decay",
        "prefill_load_scale",
        "track_prefill_tokens",
    }
    candidates = [each for vector in VECTORS for each in vector["candidates"]]
    assert any(each["preferred_weight"] for each in candidates)
    assert any(
        0 < each["overlap"][0] < each["overlap"][1] < each["overlap"][2] for each in candidates
    )


def test_1_6_credit_reaches_the_prefill_already_booked():
    """1.0 counts overlap against this prompt alone; 1.6 against all prefill work there."""
    row = candidate(10, prefill_tokens=160)
    assert costs(Dynamo16(), row, overlap_score_credit=1.5) == [20 - 15]
    assert costs(Dynamo10(), row) == [10]


def test_1_6_scale_weighs_prefill_alone():
    row = candidate(4, decode_blocks=5)
    assert costs(Dynamo16(), row, prefill_load_scale=3.0) == [3 * 6 + 5]


def test_1_6_active_requests_cost_their_weight():
    row = candidate(requests=6, decode_blocks=5)
    assert costs(Dynamo16(), row, decode_active_request_weight=0.5) == [10 + 5 + 3]


def test_1_6_credit_decays_with_prefill_booked_above_the_least_busy():
    """Excess (480 − 160) / 16 = 20 blocks, twice the request's 10: decay 1 / (1 + 0.5 · 2)."""
    rows = [candidate(4, prefill_tokens=160), candidate((4, 6), prefill_tokens=480)]
    assert costs(Dynamo16(), *rows, overlap_score_credit_decay=0.5) == [
        20 - 4,
        40 - (0.5 * 4 + 0.75 * 2),
    ]


def test_1_6_a_started_block_counts_whole_in_the_decay():
    rows = [candidate(), candidate(1, prefill_tokens=16 * 11)]
    assert costs(Dynamo16(), *rows, isl_tokens=161, overlap_score_credit_decay=1.0) == [
        161 / 16,
        (176 + 161) / 16 - 1 / (1 + 11 / 11),
    ]


def test_1_6_without_prefill_tracking_only_decode_counts():
    row = candidate(4, prefill_tokens=480, decode_blocks=9)
    assert costs(Dynamo16(), row, track_prefill_tokens=False) == [9]


def test_1_6_decode_worker_has_the_credit_off_its_decode_blocks():
    rows = [
        candidate((4, 8), prefill_tokens=480, decode_blocks=9, decode_side=1),
        candidate(9, decode_blocks=5, decode_side=1, requests=3),
    ]
    settings = {"track_prefill_tokens": False, "decode_active_request_weight": 2.0}
    assert costs(Dynamo16(), *rows, **settings) == [9 - 4 - 3, 0 + 2 * 3]
    assert costs(Dynamo16(), *rows, **settings, overlap_score_credit=0.0) == [9, 5 + 2 * 3]


def test_1_6_decode_worker_costs_like_others_while_prefill_is_tracked():
    one, two = candidate(4, decode_blocks=9, decode_side=1), candidate(4, decode_blocks=9)
    assert costs(Dynamo16(), one) == costs(Dynamo16(), two)


def test_1_6_unknown_decode_blocks_are_none():
    assert costs(Dynamo16(), candidate(decode_blocks=nan)) == [10]


def test_1_6_equal_costs_are_drawn_from_whatever_the_caches():
    counts = chosen(Dynamo16(), candidate(held=4), candidate(held=9))
    assert abs(counts[0] - 1500) < 150


@pytest.mark.parametrize("policy", [Dynamo10(), Dynamo16()])
def test_preferred_taints_multiply_the_cost(policy):
    factor = exp(-tanh(0.5))
    assert costs(policy, candidate(decode_blocks=6, taint=factor)) == [16 * factor]


# ── both ────────────────────────────────────────────────────────────────────────────────────────


def test_a_choice_names_its_policy_and_every_cost():
    of = table(candidate(decode_blocks=10), candidate(prefill_tokens=16))
    choice = Dynamo10().choose(of, PolicySettings(), Random(0))
    assert (choice.policy, choice.costs.tolist(), choice.index) == ("dynamo-1.0", [20, 11], 1)
    assert choice.chosen == of.terms(1)

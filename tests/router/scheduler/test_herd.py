"""What routers learn of each other's bursts, and how they keep out of each other's way."""

import numpy as np
import pytest
from msgspec.structs import replace

from router.protocol.values import Rank
from router.scheduler import terms
from router.scheduler.herd import (
    MOST_TURNS,
    SPREAD_S,
    ExpectedLoad,
    HerdEstimate,
    UnpublishedBooking,
)
from router.scheduler.policy.predictive import Predictive, predicted_parts
from router.scheduler.settings import PolicySettings
from router.sequence import rank_table as ranks
from router.sequence.active.footprint import Footprint
from support.fleets.peers import reservation
from support.values.terms import candidate, table

RANK = Rank(1, 0)
PROMPT = Footprint(np.empty(0, np.uint64), 0, 900, 100, 16)


def burst(herd, now_s, *, ours=1, theirs=()):
    """Book `ours` requests, and receive the others' bookings a sync lag later."""
    for _ in range(ours):
        herd.note_ours(RANK, PROMPT, now_s)
    for router_id, bookings in theirs:
        for i in range(bookings):
            herd.note_theirs(router_id, reservation(f"{router_id}.{i}"), now_s + 0.02)


def after_bursts(theirs, router_id=5, count=30, **fields):
    herd = HerdEstimate(router_id)
    for number in range(count):
        burst(herd, 3.0 * number, theirs=theirs, **fields)
    return herd, 3.0 * count


def test_lone_router_expects_no_foreign_requests():
    herd = HerdEstimate(5)
    burst(herd, 0.0, ours=10)
    assert herd.claims(0.0) is None


def test_herd_estimate_learns_concurrent_placements_per_router():
    herd, now_s = after_bursts([(2, 1), (7, 3)])
    assert herd.expected(2) == pytest.approx(1, rel=0.05)
    assert herd.expected(7) == pytest.approx(3, rel=0.05)
    assert herd.expected(8) == 0
    assert sum(herd.claims(now_s).turns) == pytest.approx(4, rel=0.05)


def test_late_foreign_placements_are_not_concurrent():
    herd = HerdEstimate(5)
    for number in range(30):
        herd.note_ours(RANK, PROMPT, number)
        herd.note_theirs(2, reservation("a"), number + 2.1 * SPREAD_S)
    assert herd.expected(2) == 0
    assert not herd.claims(30.0)


def test_turns_go_round_in_order_of_ids():
    herd, now_s = after_bursts([(2, 1), (7, 3)])
    turns = [round(turn) for turn in herd.claims(now_s).turns]
    assert turns[:5] == [1, 0, 1, 0, 1]  # 2, ours, 7; ours, 7; …


def test_turns_are_bounded():
    herd, now_s = after_bursts([(2, 300)], count=3)
    assert len(herd.claims(now_s).turns) == MOST_TURNS


def test_only_bookings_that_have_not_spread_are_unseen_by_others():
    herd, now_s = after_bursts([(2, 1)])
    assert herd.claims(now_s).ours == ()
    burst(herd, now_s, ours=2)
    assert herd.claims(now_s).ours == (UnpublishedBooking(now_s, RANK, 800, 800 * 500),) * 2
    assert herd.claims(now_s + 1.1 * SPREAD_S).ours == ()


def test_bursts_that_no_longer_come_are_forgotten():
    herd, now_s = after_bursts([(2, 3)])
    for number in range(300):
        burst(herd, now_s + number)
    assert not herd.claims(now_s + 300)


def test_routers_that_are_gone_are_forgotten():
    herd, now_s = after_bursts([(2, 3), (7, 1)])
    herd.keep({7})
    assert herd.expected(2) == 0
    assert len(herd.claims(now_s).turns) == 2


def claims(*turns, ours=()):
    return ExpectedLoad(np.array(turns, float), 8_000.0, 3.2e7, 8_000.0, ours)


def idle(count, holder=None, isl_tokens=4_000):
    """Ranks with nothing to do, one of which may hold half of the prompt."""
    rows = []
    for position in range(count):
        row = candidate(overlap=isl_tokens // 32 if position == holder else 0)
        row[terms.CACHED_BLOCKS] = row[terms.OVERLAP_DEVICE]
        row[[ranks.TRUST_WEIGHT, ranks.OUTPUT_TOKENS, ranks.REQUESTS_PER_S]] = 1, 100, 1
        row[[ranks.BASE_S, ranks.PREFILL_S, ranks.CHUNK_TOKENS]] = 0.01, 0.0001, 8_192
        row[ranks.QUEUED_TOKENS] = row[ranks.HEAD_TOKENS] = 10 * position  # told apart
        rows.append(row)
    return table(*rows, isl_tokens=isl_tokens)


def chosen(asked, *turns, **fields):
    asked = replace(asked, claims=claims(*turns, **fields))
    return Predictive().choose(asked, PolicySettings(), None).index


def test_each_of_four_routers_takes_another_rank():
    turns = ([0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0])
    assert sorted(chosen(idle(4), *each) for each in turns) == [0, 1, 2, 3]


def test_unlikely_claims_change_no_choice():
    assert chosen(idle(2), 0.001, 0) == 0


def test_a_prompt_goes_to_its_holder_where_that_is_worth_more_than_a_turn():
    long = idle(4, holder=3, isl_tokens=64_000)
    assert [chosen(long, *turns) for turns in ([0, 1, 1, 1], [1, 1, 0, 1])] == [3, 3]


def test_a_second_request_takes_our_second_turn():
    asked = idle(4)
    asked.values[0, ranks.QUEUED_TOKENS] += 8_000
    asked.values[0, ranks.QUEUED_CONTEXTS] += 3.2e7
    asked.values[0, ranks.REQUESTS] += 1
    ours = (
        UnpublishedBooking(0.0, asked.ranks[0], 8_000, 3.2e7),
        UnpublishedBooking(0.0, Rank(99, 0), 1, 1.0),
    )
    assert chosen(asked, 0, 1, 0, 1, ours=ours) == 2


def test_claims_are_in_the_parts_and_not_in_the_table():
    asked = replace(idle(2), claims=claims(1, 0))
    before = asked.values.copy()
    parts = predicted_parts(asked, PolicySettings())
    assert parts[0, 0] == pytest.approx(0.8, rel=0.1)  # 8,000 tokens wait there
    assert np.array_equal(asked.values, before)

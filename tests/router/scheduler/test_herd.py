"""What routers learn of each other's bursts, and how they keep out of each other's way."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.protocol.values import Rank
from router.scheduler import terms
from router.scheduler._herd_kernel import LEAST_EXPECTED, MEMORY, MOST_TURNS, SPREAD_S, write_turns
from router.scheduler.herd import ExpectedLoad, HerdEstimate
from router.scheduler.policy.predictive import Predictive, predicted_parts
from router.scheduler.settings import PolicySettings
from router.sequence import rank_table as ranks
from router.sequence.active.footprint import Footprint
from router.sequence.rank_table import RankTable
from support.chaos.fuzzing import examples
from support.fleets.peers import reservation
from support.values.terms import (
    arrivals,
    candidate,
    mean,
    predicted_cost,
    predicted_costs,
    saved_tokens,
    table,
)

NO_HASHES = np.empty(0, np.uint64)
PROMPT = Footprint(NO_HASHES, 0, 900, 100, 16)
RANK = Rank(1, 0)


def estimating(router_id=5, workers=1):
    """The estimate of a router, and the table of the ranks."""
    known = RankTable()
    for worker_id in range(1, workers + 1):
        known.add(Rank(worker_id, 0))
    return HerdEstimate(router_id, known), known


def burst(herd, now_s, *, ours=1, theirs=()):
    """Book `ours` requests, and receive the others' bookings a sync lag later."""
    for _ in range(ours if herd.others else 0):
        herd.note_ours(RANK, PROMPT, now_s)
    for router_id, bookings in theirs:
        booked = [reservation(f"{router_id}.{i}") for i in range(bookings)]
        herd.note_theirs(router_id, booked, now_s + 0.02)


def after_bursts(theirs, count=30, **fields):
    herd, _ = estimating()
    for number in range(count):
        burst(herd, 3.0 * number, theirs=theirs, **fields)
    return herd, 3.0 * count


def turns_of(herd):
    turns, estimate = np.empty(MOST_TURNS), herd.claims().estimate
    return turns[: write_turns(estimate, turns)].tolist() if len(estimate) else []


def test_lone_router_expects_no_foreign_requests():
    herd, _ = estimating()
    burst(herd, 0.0, ours=10)
    assert len(herd.claims().estimate) == 0


def test_herd_estimate_learns_concurrent_placements_per_router():
    herd, _ = after_bursts([(2, 1), (7, 3)])
    assert herd.expected(2) == pytest.approx(1, rel=0.05)
    assert herd.expected(7) == pytest.approx(3, rel=0.05)
    assert herd.expected(8) == 0
    assert sum(turns_of(herd)) == pytest.approx(4, rel=0.05)


def test_late_foreign_placements_are_not_concurrent():
    herd, _ = estimating()
    for number in range(30):
        burst(herd, number)
        herd.note_theirs(2, [reservation("a")], number + 2.1 * SPREAD_S)
    assert herd.expected(2) == 0
    assert turns_of(herd) == []


def test_turns_go_round_in_order_of_ids():
    herd, _ = after_bursts([(7, 3), (2, 1)])
    turns = [round(turn) for turn in turns_of(herd)]
    assert turns[:5] == [1, 0, 1, 0, 1]  # 2, ours, 7; ours, 7; …


def test_turns_are_bounded():
    herd, _ = after_bursts([(2, 300)], count=3)
    assert len(turns_of(herd)) == MOST_TURNS


def test_bursts_that_no_longer_come_are_forgotten():
    herd, now_s = after_bursts([(2, 3)])
    for number in range(300):
        burst(herd, now_s + number)
    assert turns_of(herd) == []


def test_routers_that_are_gone_are_forgotten():
    herd, _ = after_bursts([(2, 3), (7, 1)])
    herd.keep({7})
    assert herd.expected(2) == 0
    assert len(turns_of(herd)) == 2


def claims(*expected, lower=0, ours=()):
    """The others, of which some have a lower id, are expected to place these numbers of requests.

    `ours`: rows {slot, tokens, contexts, time}.
    """
    estimate = [1.0, 1.0, 8_000.0, 3.2e7, 8_000.0, lower, 0.0, len(ours), *expected]
    return ExpectedLoad(np.array(estimate), np.array(ours, float).reshape(-1, 4))


def idle(count, holder=None, isl_tokens=4_000):
    """Ranks with nothing to do, one of which may hold half of the prompt."""
    rows = []
    for position in range(count):
        row = candidate(overlap=isl_tokens // 32 if position == holder else 0)
        row[terms.CACHED_BLOCKS] = row[terms.OVERLAP_DEVICE]
        row[terms.NEW_BLOCKS] = isl_tokens  # nothing of it is booked
        row[[ranks.TRUST_WEIGHT, ranks.OUTPUT_TOKENS, ranks.REQUESTS_PER_S]] = 1, 100, 1
        row[[ranks.BASE_S, ranks.PREFILL_S, ranks.CHUNK_TOKENS]] = 0.01, 0.0001, 8_192
        row[ranks.QUEUED_TOKENS] = row[ranks.HEAD_TOKENS] = 10 * position  # differ
        rows.append(row)
    return replace(table(*rows, isl_tokens=isl_tokens), slots=np.arange(count))


def chosen(asked, *expected, **fields):
    asked = replace(asked, claims=claims(*expected, **fields))
    return Predictive().choose(asked, PolicySettings(), None).index


def test_each_of_four_routers_takes_another_rank():
    found = [chosen(idle(4), 1, 1, 1, lower=lower) for lower in range(4)]
    assert sorted(found) == [0, 1, 2, 3]


def test_a_prompt_goes_to_its_holder_where_that_is_worth_more_than_a_turn():
    long = idle(4, holder=3, isl_tokens=64_000)
    assert [chosen(long, 1, 1, 1, lower=lower) for lower in (0, 2)] == [3, 3]


def test_each_of_four_routers_takes_another_rank_where_two_hold_a_shared_beginning():
    asked = idle(6)
    for holder in (4, 5):
        blocks = asked.isl_tokens // 32
        asked.values[holder, [terms.OVERLAP_DEVICE, terms.CACHED_BLOCKS]] = blocks
    found = [chosen(asked, 1, 1, 1, lower=lower) for lower in range(4)]
    assert sorted(found) == [0, 1, 4, 5]


def test_a_second_request_takes_our_second_turn():
    asked = idle(4)
    asked.values[0, ranks.QUEUED_TOKENS] += 8_000
    asked.values[0, ranks.QUEUED_CONTEXTS] += 3.2e7
    asked.values[0, ranks.REQUESTS] += 1
    assert chosen(asked, 2, ours=[(0, 8_000, 3.2e7, 0.0), (99, 1, 1.0, 0.0)]) == 2


def test_claims_are_in_the_parts_and_not_in_the_table():
    asked = replace(idle(2), claims=claims(1, lower=1))
    before = asked.values.copy()
    parts = predicted_parts(asked, PolicySettings())
    assert parts[0, 0] == pytest.approx(0.8, rel=0.1)  # 8,000 tokens wait there
    assert np.array_equal(asked.values, before)


def test_claims_of_a_decision_stay_as_they_were():
    herd, now_s = after_bursts([(2, 3)])
    burst(herd, now_s, ours=3)
    asked = replace(idle(4), claims=herd.claims(), now_s=now_s)
    before = predicted_parts(asked, PolicySettings())
    burst(herd, now_s, ours=500, theirs=[(2, 1), (7, 1)])
    herd.forget_rank(RANK)
    assert np.array_equal(predicted_parts(asked, PolicySettings()), before)


# ── A slow model ─────────────────────────────────────────────────────────────────────────────────


class Model:
    """The rules in plain Python: an estimate, its turns, and the load that they add."""

    def __init__(self, router_id):
        self.router_id, self.bookings, self.ours = router_id, 0.0, []
        self.received, self.sums = {}, [0.0] * 4

    def size(self, isl_tokens, cached_tokens):
        tokens = max(isl_tokens - cached_tokens, 0)
        work = (tokens, tokens * (cached_tokens + tokens / 2))
        added = (1, *work, isl_tokens)
        self.sums = [each * MEMORY + more for each, more in zip(self.sums, added, strict=True)]
        return work

    def note_ours(self, rank, isl_tokens, cached_tokens, now_s):
        if self.received:
            self.forget(now_s)
            self.bookings = self.bookings * MEMORY + 1
            self.received = {each: count * MEMORY for each, count in self.received.items()}
            self.ours.append((rank, *self.size(isl_tokens, cached_tokens), now_s))

    def note_theirs(self, router_id, isl_tokens, cached_tokens, now_s):
        self.forget(now_s)
        self.received[router_id] = self.received.get(router_id, 0.0) + len(self.ours)
        self.size(isl_tokens, cached_tokens)

    def forget(self, now_s):
        while self.ours and now_s - self.ours[0][-1] > 2 * SPREAD_S:
            self.ours.pop(0)

    def forget_rank(self, rank):
        self.ours = [(None if each[0] == rank else each[0], *each[1:]) for each in self.ours]

    def turns(self):
        ids = sorted([*self.received, self.router_id])
        left = {
            router_id: self.received[router_id] / self.bookings if self.bookings else 0.0
            for router_id in sorted(self.received)
        }
        if sum(left.values()) < LEAST_EXPECTED:
            return []
        turns = []
        while max(left.values()) > 0 and len(turns) < MOST_TURNS:
            for router_id in ids:
                if router_id == self.router_id:
                    turns.append(0.0)
                elif left[router_id] > 0:
                    turns.append(min(left[router_id], 1.0))
            done = len([turn for turn in turns if turn == 0.0])
            expected = {each: self.received[each] / self.bookings for each in left}
            left = {each: expected[each] - done for each in left}
        return turns[:MOST_TURNS]

    def claimed(self, rows, of_ranks, asked_tokens, now_s, delay_weight):
        """The rows with the expected placements of others."""
        turns = self.turns()
        if not turns:
            return rows
        saved = [saved_tokens(row, asked_tokens, (0.75, 0.25, 0.0)) for row in rows]
        common = max(0.0, sorted([0.0, *saved])[-2])  # two candidates have it
        lacking = [max(common - each, 0.0) for each in saved]
        shared, claimed = [[*row] for row in rows], [[*row] for row in rows]
        for rank, tokens, contexts, booked_s in self.ours:
            if rank in of_ranks and now_s - booked_s <= SPREAD_S:
                withdraw(shared[of_ranks.index(rank)], tokens, contexts, booked_s)
        for row in shared:
            row[terms.CACHED_BLOCKS], row[terms.TAINT_FACTOR] = 0.0, 1.0
            row[terms.NEW_BLOCKS] = math.inf
        tokens, contexts, isl_tokens = (each / self.sums[0] for each in self.sums[1:])
        new = [tokens + each for each in lacking]
        for weight in turns:
            costs = self.average_costs(shared, new, isl_tokens, now_s, delay_weight)
            best = costs.index(min(costs))
            for row, part in ((claimed[best], weight), (shared[best], weight or 1.0)):
                if part:
                    put(row, part * new[best], part * contexts, part, part * isl_tokens, now_s)
        return claimed

    def average_costs(self, rows, new, isl_tokens, now_s, delay_weight):
        output, reuse = mean(rows, ranks.OUTPUT_TOKENS), mean(rows, ranks.REUSE)
        rest = (output, 1 / 3 * reuse, reuse, now_s, delay_weight)
        each = zip(rows, new, arrivals(rows), strict=True)
        return [
            predicted_cost(row, tokens, isl_tokens, per_s, *rest) for row, tokens, per_s in each
        ]

    def choice(self, rows, of_ranks, isl_tokens, expected, now_s, temperature, rng):
        """The costs, and the position that is chosen."""
        claimed = self.claimed(rows, of_ranks, isl_tokens, now_s, 0.1)
        costs = predicted_costs(claimed, isl_tokens, expected, now_s)
        best = costs.index(min(costs))
        if temperature:
            return costs, drawn(costs, temperature, rng.random())
        error = rows[best][ranks.RELATIVE_ERROR] if self.received and claimed is rows else 0.0
        equals = [i for i, cost in enumerate(costs) if cost <= costs[best] * (1 + error)]
        if claimed is not rows or len(equals) == 1:
            return costs, best
        return costs, equals[rng.randrange(len(equals))]


def withdraw(row, tokens, contexts, booked_s):
    row[ranks.QUEUED_TOKENS] = max(row[ranks.QUEUED_TOKENS] - tokens, 0.0)
    row[ranks.QUEUED_CONTEXTS] = max(row[ranks.QUEUED_CONTEXTS] - contexts, 0.0)
    row[ranks.REQUESTS] = max(row[ranks.REQUESTS] - 1, 0.0)
    if row[ranks.HEAD_SINCE_S] >= booked_s:
        row[ranks.HEAD_TOKENS] = row[ranks.HEAD_CONTEXTS] = 0.0


def put(row, tokens, contexts, requests, isl_tokens, now_s):
    if row[ranks.HEAD_TOKENS] == 0:
        row[ranks.HEAD_TOKENS], row[ranks.HEAD_CONTEXTS] = tokens, contexts
        row[ranks.HEAD_SINCE_S] = now_s
    row[ranks.QUEUED_TOKENS] += tokens
    row[ranks.QUEUED_CONTEXTS] += contexts
    row[ranks.REQUESTS] += requests
    row[ranks.DECODE_BLOCKS] += isl_tokens / row[ranks.BLOCK_SIZE]


def drawn(costs, temperature, sample):
    spread = max(costs) - min(costs) or 1.0
    sums = np.cumsum([np.exp(-(cost - min(costs)) / spread / temperature) for cost in costs])
    return next((i for i, each in enumerate(sums) if sample * sums[-1] < each), len(costs) - 1)


WORKERS = 5
lengths = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda of: (900 * of[0], 300 * of[1]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ours"), st.integers(1, WORKERS), lengths),
        st.tuples(st.just("ours"), st.integers(1, WORKERS), lengths),
        st.tuples(st.just("theirs"), st.sampled_from([2, 7, 9]), st.lists(lengths, min_size=1)),
        st.tuples(st.just("later"), st.sampled_from([0.001, 0.02, 0.1]), st.none()),
        st.tuples(st.just("gone"), st.sampled_from([2, 7, 9]), st.none()),
        st.tuples(st.just("another rank"), st.integers(1, WORKERS), st.none()),
    ),
    max_size=60,
)
loads = st.fixed_dictionaries(
    {
        ranks.QUEUED_TOKENS: st.sampled_from([0, 0, 700, 9_000]),
        ranks.HEAD_TOKENS: st.sampled_from([0, 700]),
        ranks.HEAD_SINCE_S: st.floats(0, 1),
        ranks.REQUESTS: st.integers(0, 3),
        ranks.DECODING_REQUESTS: st.integers(0, 2),
        ranks.DECODE_BLOCKS: st.sampled_from([0, 90]),
        ranks.CAPACITY_BLOCKS: st.sampled_from([0, 100]),
        ranks.FOREIGN_REQUESTS: st.sampled_from([0, 0, 1]),
        ranks.SLOW_UNTIL_S: st.sampled_from([0, 20]),
        ranks.BURSTS: st.sampled_from([0, 2, 3]),
        ranks.PLACED_AT: st.sampled_from([0, 3, 40]),
        ranks.RELATIVE_ERROR: st.sampled_from([0, 0.05, 0.5]),
        terms.OVERLAP_DEVICE: st.sampled_from([0, 0, 40]),
        terms.CACHED_BLOCKS: st.sampled_from([0, 0, 40]),
        terms.TAINT_FACTOR: st.sampled_from([1, 1, 0.5]),
    }
)
RATES = {
    ranks.TRUST_WEIGHT: 1,
    ranks.HELD_BLOCKS: 80,
    ranks.BASE_S: 0.01,
    ranks.PREFILL_S: 1e-4,
    ranks.CONTEXT_S: 2e-9,
    ranks.DECODE_S: 2e-4,
    ranks.KV_S: 2e-8,
    ranks.CHUNK_TOKENS: 2_048,
    ranks.REQUESTS_PER_S: 2,
    ranks.PREFILL_SHARE: 0.3,
    ranks.OUTPUT_TOKENS: 90,
    ranks.REUSE: 0.5,
}


def happened(taken, router_id):
    """The estimate and the model after these steps, the ranks, and the time."""
    (herd, known), model, now_s = estimating(router_id, WORKERS), Model(router_id), 0.0
    for step, which, more in taken:
        rank = Rank(which, 0) if isinstance(which, int) else None
        if step == "ours":
            if herd.others:
                herd.note_ours(rank, Footprint(NO_HASHES, 0, *more, 16), now_s)
            model.note_ours(rank, *more, now_s)
        elif step == "theirs":
            sized = [
                replace(reservation("a"), isl_tokens=isl_tokens, cached_tokens=cached_tokens)
                for isl_tokens, cached_tokens in more
            ]
            herd.note_theirs(which, sized, now_s)
            for each in more:
                model.note_theirs(which, *each, now_s)
        elif step == "later":
            now_s += which
        elif step == "gone":
            herd.keep({2, 7, 9} - {which})
            model.received.pop(which, None)
        else:
            herd.forget_rank(rank)
            model.forget_rank(rank)
    return herd, known, model, now_s


@settings(max_examples=examples(25), deadline=None)
@given(steps, st.lists(loads, min_size=1, max_size=WORKERS), st.sampled_from([1, 5, 20]),
       st.sampled_from([512, 4_000]), st.sampled_from([None, 40]), st.sampled_from([0.0, 0.0, 0.5]),
       st.randoms(use_true_random=False))  # fmt: skip
def test_costs_choice_and_draws_equal_slow_model(
    taken, given_loads, router_id, isl_tokens, expected, temperature, shuffled
):
    herd, known, model, now_s = happened(taken, router_id)
    rows = []
    for load in given_loads:
        row = candidate(load[terms.OVERLAP_DEVICE])
        for column, value in {**RATES, **load}.items():
            row[column] = value
        row[ranks.QUEUED_CONTEXTS] = 400 * row[ranks.QUEUED_TOKENS]
        rows.append(row)
    worker_ids = sorted(shuffled.sample(range(1, WORKERS + 1), len(rows)))
    made = table(*rows, isl_tokens=isl_tokens, worker_ids=worker_ids)
    slots = np.array([known.slot(rank) for rank in made.ranks])
    made = replace(made, now_s=now_s, expected_output_tokens=expected, claims=herd.claims())
    dice, rng = Random(3), Random(3)
    wanted = PolicySettings(router_temperature=temperature)
    choice = Predictive().choose(replace(made, slots=slots), wanted, rng)

    plain = [row.tolist() for row in rows]
    of_ranks = [*made.ranks]
    costs, index = model.choice(plain, of_ranks, isl_tokens, expected, now_s, temperature, dice)
    assert turns_of(herd) == model.turns()
    assert choice.costs.tolist() == costs
    assert choice.index == index
    assert rng.getstate() == dice.getstate()

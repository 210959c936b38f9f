"""Requests with objectives: where they are placed, when they are refused, what they protect."""

from math import inf
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.core.commands import (
    Admit,
    Free,
    PrefillComplete,
    RemoveWorker,
    Reserve,
    Select,
    SelectAndReserve,
    Submit,
)
from router.core.selections import Selection
from router.protocol.loads import LoadCounters
from router.protocol.replicas import PromptUsage
from router.protocol.requests import ReserveRequest, SelectRequest
from router.scheduler.errors import SloNotMetError
from router.scheduler.policy import _predicted_parts as kernel
from router.scheduler.queue.waiting_room import Queueing
from router.sequence.active.promises import REFUSED_AT_MOST
from router.sequence.active.prompt import prepare
from router.sequence.rank_table import BURSTS, PROMISED_TOKENS_PER_S
from support.values.builders import World, rank

TOKEN_S, BURST = 1e-4, 2_000
NOW_S = 1_000.0
"""A prompt token takes 0.1 ms there, a step 10 ms."""


def world(workers=2, **fields):
    made = World(rng=Random(1), default_policy="predictive", **fields)
    for worker_id in range(1, workers + 1):
        made.worker(worker_id)
        measure(made, rank(worker_id))
    return made


def measure(made, each):
    """Let reports teach the rates of a rank, until they are believed."""
    counters = LoadCounters()
    for number in range(1, 200):
        counters = LoadCounters(
            steps=10 * number,
            busy_s=number * (10 * 0.01 + BURST * TOKEN_S),
            prefill_tokens=BURST * number,
            prefill_token_contexts=0,
            requests_received=number,
            requests_finished=number,
        )
        made.report_load(each, 4.0 * number, counters=counters)
    assert made.core.ranks.row(each)[BURSTS] >= 3


def prompt(number, tokens):
    return list(range(1_000_000 * number, 1_000_000 * number + tokens))


def totals(made):
    ((_, found),) = made.core.tracker.promises.totals.items()
    return dict(found)


def test_a_request_goes_where_its_objective_is_met_though_that_costs_more():
    made = world()
    for number in range(40):  # they would be delayed
        made.book(f"r{number}", prompt(number, 10), NOW_S, allowed_worker_ids=[1])
        made.core.handle(PrefillComplete(f"r{number}"), NOW_S)
    made.book("long", prompt(50, 10_000), NOW_S, allowed_worker_ids=[2])  # a second to wait for
    asked = {"token_ids": prompt(51, 10_000), "now_s": NOW_S}
    plain = made.select(**asked)
    predicted_s = made.core.explain(SelectRequest(), plain).predicted_s
    first_s = predicted_s[:, : kernel.PREFILL_OWN_S + 1].sum(axis=1)
    assert first_s[0] < first_s[1] - 0.2
    assert plain.rank == rank(2)
    between_ms = 1e3 * first_s.mean()
    assert made.select(**asked, slo_ttft_ms=between_ms).rank == rank(1)
    assert made.select(**asked, slo_ttft_ms=10 * between_ms).rank == rank(2)


def test_a_request_that_no_rank_can_serve_in_time_is_refused_with_the_prediction():
    made = world()
    for worker_id in (1, 2):
        made.book(f"long{worker_id}", prompt(worker_id, 60_000), NOW_S, slo_ttft_ms=60_000)
    with pytest.raises(SloNotMetError) as refused:
        made.book("late", prompt(3, 1_000), NOW_S, slo_ttft_ms=500)
    error = refused.value
    assert error.predicted_ttft_s == pytest.approx(6.2, abs=1.5)
    assert error.retry_after_s == pytest.approx(error.predicted_ttft_s - 0.5, abs=0.01)
    assert (error.slo_ttft_ms, error.slo_tpot_ms, error.field) == (500, None, "slo_ttft_ms")
    assert "late" not in made.core.tracker
    assert totals(made) == {"refused": 1}
    made.book("later", prompt(3, 1_000), NOW_S, slo_ttft_ms=500, slo_unmet="place")
    assert "later" in made.core.tracker


def test_a_time_per_token_that_is_below_a_step_is_refused():
    made = world()
    with pytest.raises(SloNotMetError, match="slo_tpot_ms: 1 ms cannot be met"):
        made.select(prompt(1, 100), NOW_S, slo_tpot_ms=1)
    assert made.core.tracker.promises.totals == {}, "nothing was to be booked"
    made.select(prompt(1, 100), NOW_S, slo_ttft_ms=0.001, phase="decode")  # computed elsewhere


def test_ranks_that_are_not_measured_may_meet_anything():
    made = World(default_policy="predictive")
    made.worker(1)
    assert made.select(prompt(1, 50_000), NOW_S, slo_ttft_ms=1).rank == rank(1)


def test_one_of_many_is_placed_although_all_are_predicted_to_miss():
    made = world(1)
    asked = {"slo_ttft_ms": 0.001}
    for number in range(REFUSED_AT_MOST):
        with pytest.raises(SloNotMetError):
            made.book(f"r{number}", prompt(number, 100), NOW_S, **asked)
    made.book("placed", prompt(0, 100), NOW_S, **asked)
    with pytest.raises(SloNotMetError):
        made.book("next", prompt(0, 100), NOW_S, **asked)


def test_promises_make_a_rank_costlier_to_disturb_until_they_are_over():
    made = world()
    made.book("promised", prompt(1, 10), NOW_S, slo_tpot_ms=100, allowed_worker_ids=[1])
    made.core.handle(PrefillComplete("promised"), NOW_S + 0.1)
    row = made.core.ranks.row(rank(1))
    assert row[PROMISED_TOKENS_PER_S] == pytest.approx(10)
    placed = made.select(prompt(2, 10_000), NOW_S + 1)
    missed_s = made.core.explain(SelectRequest(), placed).predicted_s[:, kernel.MISSED_S]
    assert missed_s[0] == pytest.approx(kernel.LATE_TOKEN_S * 10 * 1.0, rel=0.3)
    assert missed_s[1] == 0
    usage = PromptUsage(10, 0, is_cached_told=False, output_tokens=11)
    made.core.handle(Free("promised", usage), NOW_S + 0.9)
    assert row[PROMISED_TOKENS_PER_S] == 0
    assert totals(made) == {"met": 1}
    made.core.tracker.check_invariants()


def test_without_objectives_costs_are_the_same_to_the_bit():
    plain, kept = world(), world()
    kept.book("promised", prompt(1, 10), NOW_S, slo_tpot_ms=100)
    kept.core.handle(Free("promised"), NOW_S)
    plain.book("promised", prompt(1, 10), NOW_S)
    plain.core.handle(Free("promised"), NOW_S)
    for number in range(2, 12):
        found = [
            each.book(f"r{number}", prompt(number, 700 * number), NOW_S + number)[0]
            for each in (plain, kept)
        ]
        assert np.array_equal(found[0].choice.costs, found[1].choice.costs)
        assert found[0].rank == found[1].rank
        assert found[0].promise is None


def test_classes_have_objectives_and_requests_have_their_own_instead():
    classes = """
        default_policy_family = "chat"
        [[uncached_isl_buckets]]
        min_tokens = 0
        bucket = "short"
        [[uncached_isl_buckets]]
        min_tokens = 500
        bucket = "long"
        [[policy_classes]]
        name = "chat_short"
        policy_family = "chat"
        cache_bucket = "short"
        slo_ttft_ms = 0.001
        [[policy_classes]]
        name = "chat_long"
        policy_family = "chat"
        cache_bucket = "long"
        slo_ttft_ms = 60000
        [[policy_classes]]
        name = "batch"
        slo_tpot_ms = 0.001
        slo_unmet = "place"
    """
    made = world(queueing=Queueing(policy_file=classes))
    with pytest.raises(SloNotMetError) as refused:
        made.select(prompt(1, 100), NOW_S)
    assert refused.value.policy_class == "chat_short"
    assert made.select(prompt(1, 600), NOW_S).promise.policy_class == "chat_long"
    assert made.select(prompt(1, 100), NOW_S, slo_ttft_ms=60_000).promise.most_ttft_s == 60
    batch = made.select(prompt(1, 100), NOW_S, policy_class="batch").promise
    assert (batch.most_ttft_s, batch.is_expected) == (inf, False)


def test_the_time_in_the_queue_is_part_of_the_objective():
    made = world(1, queueing=Queueing(0.0))
    made.book("first", prompt(1, 100), NOW_S)
    request = SelectRequest(token_ids=prompt(2, 100), request_id="second", slo_ttft_ms=2_000)
    admissions = []
    for now_s, request_id in ((NOW_S, "second"), (NOW_S, "third")):
        asked = replace(request, request_id=request_id)
        ticket, _ = made.core.handle(submit(asked), now_s)
        assert isinstance(ticket, int)
    made.core.handle(Free("first"), NOW_S + 1.0)
    admissions.append(made.core.handle(Admit(), NOW_S + 1.0)[0])
    made.core.handle(Free("second"), NOW_S + 1.995)
    admissions.append(made.core.handle(Admit(), NOW_S + 1.995)[0])
    assert admissions[0].outcome.promise.waited_s == 1.0
    assert isinstance(admissions[1].outcome, SloNotMetError)


def submit(request):
    return Submit(request, prepare(request, ()))


def test_other_policies_place_it_and_count_what_becomes_of_it():
    made = World(default_policy="round-robin")
    made.worker(1)
    measure(made, rank(1))
    made.book("a", prompt(1, 100), NOW_S, slo_ttft_ms=0.001)
    made.core.handle(PrefillComplete("a"), NOW_S + 1)
    made.core.handle(Free("a"), NOW_S + 2)
    assert totals(made) == {"missed_ttft": 1}


def test_objectives_of_a_booked_rank_and_of_a_selection_are_counted():
    made = world()
    request = SelectRequest(token_ids=prompt(1, 40), selection_id="s", slo_ttft_ms=1_000)
    placed = made.core.handle(Select(request, prepare(request, ())), NOW_S)[0]
    booking = Selection.of(request, placed.rank, placed.prompt.public_hashes, None).request
    assert isinstance(booking, ReserveRequest)
    assert booking.slo_ttft_ms == 1_000
    reserve(made, booking)
    made.core.handle(PrefillComplete("s"), NOW_S + 0.5)
    made.core.handle(Free("s"), NOW_S + 2)
    assert totals(made) == {"met": 1}


def reserve(made, booking):
    made.core.handle(Reserve(booking, made.core.hashed(booking)), NOW_S)


def test_a_removed_worker_leaves_no_promise():
    made = world()
    asked = SelectRequest(token_ids=prompt(1, 40), request_id="a", slo_tpot_ms=500)
    made.core.handle(SelectAndReserve(asked, prepare(asked, ())), NOW_S)
    for worker_id in (1, 2):
        made.core.handle(RemoveWorker(worker_id, "test"), NOW_S)
    assert totals(made) == {"unknown": 1}
    made.core.tracker.check_invariants()

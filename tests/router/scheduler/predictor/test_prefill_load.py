"""Booked prompts, as far as they should be computed by now."""

import numpy as np
import pytest

from router.core.commands import Admit, Free, PrefillComplete, Select, Submit, Tick
from router.core.effects import AdmitWaiting
from router.protocol.requests import ConfigOverride, SelectRequest
from router.scheduler.policy._predicted_parts import QUEUE_S
from router.scheduler.queue.waiting_room import Queueing
from router.sequence.active.prompt import prepare
from router.sequence.rank_table import (
    BASE_S,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    PREFILL_S,
    PREFILL_TOKENS,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
)
from support.values.builders import World, rank

RATES = [0.0, 0.001, 0.0, 0.0, 0.0]
"""A millisecond a prompt token, and nothing else."""


def world_of(**fields):
    world = World(**{"models_prefill": True, **fields})
    world.worker(1, agent_is_engine=False)
    world.core.ranks.row(rank(1))[BASE_S : BASE_S + 5] = RATES
    return world


def book(world, request_id, tokens, now_s, first=0):
    world.book(request_id, list(range(first, first + tokens)), now_s)


def weighed(world, now_s):
    """The row of the only candidate."""
    request = SelectRequest(token_ids=[1])
    return world.core.handle(Select(request, prepare(request, ())), now_s)[0].choice.table.values[0]


def left(world, now_s):
    return pytest.approx(weighed(world, now_s)[PREFILL_TOKENS])


def test_the_oldest_prompt_is_computed_at_its_rate():
    world = world_of()
    book(world, "a", 1000, 10.0)
    assert [weighed(world, now_s)[PREFILL_TOKENS] for now_s in (10.0, 10.25, 10.999)] == [
        1000.0,
        750.0,
        pytest.approx(1.0),
    ]


def test_remaining_time_goes_to_the_next_prompt():
    world = world_of()
    book(world, "a", 1000, 10.0)
    book(world, "b", 400, 10.1, first=5000)
    assert left(world, 11.1) == 300.0
    assert weighed(world, 11.1)[HEAD_TOKENS] == pytest.approx(300.0)


def test_when_all_should_be_computed_nothing_is_left():
    world = world_of()
    book(world, "a", 1000, 10.0)
    row = weighed(world, 99.0)
    assert row[[PREFILL_TOKENS, QUEUED_CONTEXTS, HEAD_TOKENS]].tolist() == [0.0, 0.0, 0.0]


def test_time_counts_from_when_a_prompt_became_the_oldest():
    world = world_of()
    book(world, "a", 1000, 10.0)
    book(world, "b", 400, 10.0, first=5000)
    world.core.handle(PrefillComplete("a"), 20.0)
    assert left(world, 20.1) == 300.0


def test_a_prompt_takes_a_step_at_least():
    world = world_of()
    row = world.core.ranks.row(rank(1))
    row[BASE_S], row[PREFILL_S] = 1.0, 0.0
    book(world, "a", 100, 10.0)
    assert left(world, 10.5) == 50.0


def test_time_that_seems_to_go_back_computes_nothing():
    world = world_of()
    book(world, "a", 1000, 10.0)
    assert left(world, 9.0) == 1000.0


def test_prediction_does_not_change_bookings():
    world = world_of()
    book(world, "a", 1000, 10.0)
    before = world.core.ranks.row(rank(1)).copy()
    weighed(world, 10.5)
    assert np.array_equal(world.core.ranks.row(rank(1)), before)
    world.core.tracker.check_invariants()


def test_without_the_model_a_prompt_counts_whole_until_completion_is_reported():
    world = world_of(models_prefill=False)
    book(world, "a", 1000, 10.0)
    assert left(world, 99.0) == 1000.0
    world.core.handle(PrefillComplete("a"), 99.0)
    assert left(world, 99.0) == 0.0


@pytest.mark.parametrize(("models_prefill", "is_placed"), [(True, True), (False, False)])
def test_waiting_request_is_placed_at_expected_prefill_completion(models_prefill, is_placed):
    world = world_of(models_prefill=models_prefill, queueing=Queueing(0.1, "fcfs"))
    book(world, "a", 1000, 10.0)
    request = SelectRequest(token_ids=[1], request_id="b")
    ticket, _ = world.core.handle(Submit(request, prepare(request, ())), 10.1)
    assert isinstance(ticket, int)  # 900 tokens are left, above 0.1 · 8,192
    assert world.core.handle(Admit(), 10.1)[0] is None
    assert AdmitWaiting() in world.core.handle(Tick(), 10.3)[1]
    admission = world.core.handle(Admit(), 10.3)[0]
    assert (admission is not None and admission.outcome.rank == rank(1)) == is_placed


def test_a_policy_that_models_it_anyway_counts_nothing_twice():
    """`predictive` takes off what the oldest has had; of what the model leaves, nothing."""
    costs = []
    for models_prefill in (True, False):
        world = world_of(models_prefill=models_prefill)
        book(world, "a", 1000, 10.0)
        request = SelectRequest(
            token_ids=[1], router_config_override=ConfigOverride(policy="predictive")
        )
        choice = world.core.handle(Select(request, prepare(request, ())), 10.4)[0].choice
        costs.append(choice.costs[0])
        assert choice.table.values[0, HEAD_SINCE_S] == (10.4 if models_prefill else 10.0)
    assert costs[0] == pytest.approx(costs[1])


def test_a_prompt_begins_no_earlier_than_it_was_booked():
    world = world_of()
    book(world, "a", 1000, 10.0)
    book(world, "b", 400, 50.0, first=5000)
    assert left(world, 50.1) == 300.0


def of_silent_callers():
    """Eleven of the last hundred requests ended without a word: 1 − 0.99 ** 11 = 0.105."""
    world = world_of(models_prefill=False)
    for number in range(11):
        book(world, f"before{number}", 100, 0.0)
        world.core.handle(Free(f"before{number}"), 1.0)
    return world


def seen(world, now_s):
    """After a tick: tokens as Dynamo counts them, tokens that `predictive` sees, its queue."""
    world.core.handle(Tick(), now_s)
    world.core.tracker.check_invariants()
    row = weighed(world, now_s)
    request = SelectRequest(
        token_ids=[1], router_config_override=ConfigOverride(policy="predictive")
    )
    placement = world.core.handle(Select(request, prepare(request, ())), now_s)[0]
    queue_s = world.core.explain(request, placement).predicted_s[0, QUEUE_S]
    return row[PREFILL_TOKENS], row[QUEUED_TOKENS], pytest.approx(queue_s)


def test_without_completion_reports_prompts_complete_by_prediction():
    """1,000 tokens from 10.0 and 400 from 11.0 are computed at 11.4; 600 booked at 20 at 20.6."""
    world = of_silent_callers()
    book(world, "a", 1000, 10.0)
    book(world, "b", 400, 10.1, first=5000)
    assert seen(world, 10.2) == (1400, 1400, 1.2)
    assert seen(world, 11.1) == (1400, 400, 0.3)
    assert world.core.tracker.active(rank(1)).decoding_requests == 1
    assert seen(world, 11.5) == (1400, 0, 0.0)
    book(world, "c", 600, 20.0, first=9000)
    assert seen(world, 20.4) == (2000, 600, 0.2)
    assert seen(world, 20.6) == (2000, 0, 0.0)
    world.core.handle(PrefillComplete("a"), 21.0)
    assert seen(world, 21.0) == (1000, 0, 0.0)
    world.core.handle(Free("b"), 21.0)
    world.core.handle(Free("c"), 21.0)
    assert seen(world, 21.0) == (0, 0, 0.0)


def test_with_completion_reports_a_late_prompt_is_still_computed():
    world = world_of(models_prefill=False)
    for number in range(50):
        book(world, f"before{number}", 100, 0.0)
        world.core.handle(PrefillComplete(f"before{number}"), 1.0)
        world.core.handle(Free(f"before{number}"), 1.0)
    book(world, "a", 1000, 10.0)
    book(world, "b", 400, 10.1, first=5000)
    assert seen(world, 99.0) == (1400, 1400, 0.4)


def test_request_behind_silent_callers_is_placed_at_expected_completion():
    world = world_of(models_prefill=False, queueing=Queueing(0.1, "fcfs"))
    for number in range(11):
        book(world, f"before{number}", 100, 0.0)
        world.core.handle(Free(f"before{number}"), 1.0)
    book(world, "a", 1000, 10.0)
    request = SelectRequest(token_ids=[1], request_id="b")
    ticket, _ = world.core.handle(Submit(request, prepare(request, ())), 10.1)
    world.core.handle(Tick(), 10.9)
    assert isinstance(ticket, int)
    assert world.core.handle(Admit(), 10.9)[0] is None
    assert AdmitWaiting() in world.core.handle(Tick(), 11.0)[1]
    assert world.core.handle(Admit(), 11.0)[0].outcome.rank == rank(1)

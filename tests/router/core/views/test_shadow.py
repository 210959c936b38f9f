"""What would have been chosen, held against what was."""

from random import Random

import pytest

from router.core.commands import Select
from router.core.views.shadow import MAX_DIFFERENCES, Shadow
from router.protocol.requests import SelectRequest
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

PROMPT = list(range(40))
"""Ten blocks."""


class Compared:
    """Two workers, the first of which holds the prompt, and a shadow."""

    def __init__(self):
        self.world = World()
        for worker_id in (1, 2):
            self.world.worker(worker_id)
        self.world.cache(rank(1), PROMPT)
        self.core, self.shadow = self.world.core, Shadow(0.0)

    def compare(self, incumbent, tokens=PROMPT, now_s=0.0, **fields):
        request = SelectRequest(token_ids=tokens, request_id="r", **fields)
        placement = self.core.handle(Select(request, prepare(request, ())), 0.0)[0]
        self.shadow.compare(self.core, request, placement, incumbent, "request", now_s, 7)

    @property
    def totals(self):
        (scope,) = self.shadow.report(6.5).scopes
        return scope


@pytest.fixture
def compared():
    return Compared()


def test_an_equal_choice_is_agreement(compared):
    compared.compare(rank(1))
    totals = compared.totals
    assert (totals.compared, totals.agreed, totals.tied) == (1, 1, 0)
    assert totals.ours == totals.theirs
    assert totals.ours.predicted_cached_blocks == 9
    assert compared.shadow.report(6.5).differences == []


def test_another_choice_is_a_difference_with_both_ranks_terms(compared):
    compared.compare(rank(2), now_s=0.5)
    totals = compared.totals
    assert (totals.compared, totals.agreed, totals.isl_tokens) == (1, 0, 40)
    assert (totals.ours.predicted_cached_tokens, totals.theirs.predicted_cached_tokens) == (36, 0)
    assert (totals.ours.projected_prefill_tokens, totals.theirs.projected_prefill_tokens) == (0, 40)
    (difference,) = compared.shadow.report(6.5).differences
    assert (difference.ours.worker_id, difference.theirs.worker_id) == (1, 2)
    assert (difference.age_s, difference.claimed_overlap_blocks) == (6.0, 7)
    assert difference.theirs.potential_prefill_tokens == 40
    assert difference.ours.trust.state == "exact"


def test_a_choice_as_good_as_ours_is_a_tie(compared):
    others = [9] * 40
    for incumbent in (rank(1), rank(2)):
        compared.compare(incumbent, others)
    totals = compared.totals
    assert (totals.compared, totals.agreed, totals.tied) == (2, 1, 1)


def test_a_rank_that_is_no_candidate_is_not_compared(compared):
    compared.compare(rank(3))
    compared.compare(rank(2), allowed_worker_ids=[1])
    totals = compared.totals
    assert (totals.compared, totals.unknown_ranks) == (0, 2)


def test_nothing_is_booked(compared):
    compared.compare(rank(1))
    assert len(compared.core.tracker) == 0


def test_differences_are_bounded_and_the_newest_first(compared):
    for number in range(MAX_DIFFERENCES + 5):
        compared.compare(rank(2), now_s=number)
    report = compared.shadow.report(1000.0)
    assert len(report.differences) == MAX_DIFFERENCES
    assert report.differences[0].age_s == 1000.0 - (MAX_DIFFERENCES + 4)
    assert compared.totals.compared == MAX_DIFFERENCES + 5


def test_second_policy_chooses_without_a_trace_in_the_core(compared):
    request = SelectRequest(token_ids=PROMPT, request_id="r")
    prompt, draws = prepare(request, ()), Random(0)
    ranks = [
        compared.core.place_under("round-robin", request, prompt, 0.0, draws).rank for _ in range(4)
    ]
    assert {each.worker_id for each in ranks} == {1, 2}
    assert len(compared.core.tracker) == 0
    assert compared.core.handle(Select(request, prompt), 0.0)[0].rank == rank(1)


def test_choices_are_added_with_the_time_to_the_first_token_predicted_of_them(compared):
    compared.compare(rank(2))
    totals = compared.totals
    assert 0 < totals.ours.predicted_ttft_s < totals.theirs.predicted_ttft_s

"""Several workers' reports as one: all have to have said it."""

import pytest

from router.errors import InvalidFieldError
from worker_agent.connector.slots.protocol import Completion, StepReport
from worker_agent.connector.slots.rank_reports import RankReports

NOTHING = StepReport([], [])


def test_a_transfer_is_over_when_all_ranks_say_so_and_right_where_it_is_for_all():
    reports = RankReports(2)
    assert reports.add(0, StepReport([Completion(1), Completion(2, {0: "lost"})])) == NOTHING
    assert reports.waiting == 2
    assert reports.add(1, StepReport([Completion(2, {0: "late", 3: "late"})])) == StepReport(
        [Completion(2, {0: "rank 0: lost", 3: "rank 1: late"})]
    )
    assert reports.add(1, StepReport([Completion(1)])) == StepReport([Completion(1)])
    assert reports.waiting == 0


def test_a_request_s_blocks_are_free_when_no_rank_uses_them():
    reports = RankReports(3)
    assert reports.add(2, StepReport([], ["r"])) == NOTHING
    assert reports.add(2, StepReport([], ["r"])) == NOTHING
    assert reports.add(0, StepReport([], ["r", 1])) == NOTHING
    assert reports.add(1, StepReport([], ["r"])) == StepReport([], ["r"])
    assert reports.waiting == 1


def test_one_rank_is_passed_on():
    report = StepReport([Completion(1), Completion(2)], ["r"])
    assert RankReports(1).add(0, report) == report


@pytest.mark.parametrize("rank", [-1, 2])
def test_invalid_ranks_are_refused(rank):
    with pytest.raises(InvalidFieldError, match=f"rank: {rank}"):
        RankReports(2).add(rank, NOTHING)
    with pytest.raises(InvalidFieldError, match="num_ranks: 0"):
        RankReports(0)

"""Who exists, who may be chosen, who is gone."""

import pytest
from msgspec import structs

from builders import announcement, rank, report
from router.fleet import Fleet, LivenessLimits
from router.heard import HeardFrom, HeardWorker
from router.protocol.values import I64_MAX, Scope

LIMITS = LivenessLimits(silence_s=2.5, heartbeat_s=1.0, freeze_s=30.0)
SCOPE = Scope("default", "default")


@pytest.fixture
def fleet():
    fleet = Fleet(LIMITS)
    fleet.set_connected(True, 0.0)
    return fleet


def with_workers(fleet, count, heard_s=0.0, **fields):
    for worker_id in range(1, count + 1):
        fleet.put(announcement(worker_id, **fields), 0.0)
        fleet.hear(report(worker_id), heard_s)


def gone(fleet, now_s):
    return [worker.worker_id for worker in fleet.take_gone(now_s)]


def test_an_announced_engine_is_chosen_once_it_is_heard(fleet):
    fleet.put(announcement(1), 0.0)
    assert fleet.schedulable(SCOPE) == []
    fleet.hear(report(1), 0.5)
    assert [w.worker_id for w in fleet.schedulable(SCOPE)] == [1]


def test_an_announced_engine_that_is_never_heard_goes(fleet):
    fleet.put(announcement(1), 0.0)
    assert gone(fleet, 2.4) == []
    assert gone(fleet, 2.6) == [1]


def test_a_report_with_a_number_from_nowhere_silences_nobody_for_good(fleet):
    fleet.put(announcement(1), 0.0)
    fleet.hear(report(1, report_id=I64_MAX), 1.0)
    for made_after_s in (None, 0.9, 1.0):
        assert not fleet.hear(report(1), 2.0, made_after_s)
    assert fleet.hear(report(1), 2.0, 1.1)
    assert (gone(fleet, 4.4), fleet.stale_reports) == ([], 3)


def test_silence_past_the_limit_is_the_end(fleet):
    with_workers(fleet, 3)
    fleet.hear(report(2), 1.2)
    fleet.hear(report(3), 1.9)
    assert gone(fleet, 2.5) == []
    assert gone(fleet, 2.6) == [1]
    assert len(fleet) == 2


def test_beside_a_live_engine_silence_is_not_the_end(fleet):
    with_workers(fleet, 1, agent_is_engine=False)
    assert gone(fleet, 60.0) == []
    worker = fleet.get(1)
    assert fleet.is_schedulable(worker)
    assert fleet.silence_s(worker, 60.0) == 60.0


def test_nobody_is_gone_while_we_are_deaf(fleet):
    with_workers(fleet, 3)
    fleet.set_connected(False, 1.0)
    assert gone(fleet, 60.0) == []
    assert fleet.silence_s(fleet.get(1), 60.0) is None


def test_everybody_gets_time_to_be_heard_after_we_were_deaf(fleet):
    with_workers(fleet, 3)
    fleet.set_connected(False, 1.0)
    fleet.set_connected(True, 60.0)
    fleet.hear(report(1), 61.5)
    fleet.hear(report(2), 62.0)
    assert gone(fleet, 62.4) == []
    assert gone(fleet, 62.6) == [3]


def test_when_most_fall_silent_together_liveness_freezes(fleet):
    with_workers(fleet, 5)
    for worker_id in (4, 5):
        fleet.hear(report(worker_id), 2.4)
    fleet.hear(report(3), 0.9)
    assert gone(fleet, 2.6) == []
    assert fleet.is_frozen
    assert fleet.schedulable_count() == 5


def test_a_freeze_ends_when_they_are_heard_again(fleet):
    with_workers(fleet, 3)
    assert gone(fleet, 2.6) == []
    for worker_id in (1, 2, 3):
        fleet.hear(report(worker_id), 5.0)
    assert gone(fleet, 5.1) == []
    assert not fleet.is_frozen


def test_a_freeze_does_not_last_for_ever(fleet):
    with_workers(fleet, 3)
    assert gone(fleet, 2.6) == []
    assert gone(fleet, 32.5) == []
    assert gone(fleet, 32.7) == [1, 2, 3]


def test_workers_never_heard_do_not_freeze_it(fleet):
    """A whole fleet died while we were down; its announcements are still there."""
    for worker_id in range(1, 6):
        fleet.put(announcement(worker_id), 0.0)
    assert gone(fleet, 2.6) == [1, 2, 3, 4, 5]


def test_quiet_workers_that_promise_no_reports_do_not_freeze_it(fleet):
    """Workers of another fleet speak only when something changes."""
    with_workers(fleet, 1)
    for worker_id in (7, 8, 9):
        fields = structs.asdict(announcement(worker_id, agent_is_engine=False))
        heard_from = HeardFrom("dynamo://ns/backend")
        fleet.put(HeardWorker(**fields, dp_ranks=(0,), heard_from=heard_from), 0.0)
        fleet.hear(report(worker_id), 0.0)
    assert gone(fleet, 2.6) == [1]


def test_one_worker_alone_is_no_majority(fleet):
    with_workers(fleet, 1)
    assert gone(fleet, 2.6) == [1]


def test_orders_outlive_workers(fleet):
    with_workers(fleet, 2)
    fleet.order(1, "cordoned")
    assert [w.worker_id for w in fleet.schedulable(SCOPE)] == [2]
    fleet.remove(1)
    with_workers(fleet, 2)
    assert [w.worker_id for w in fleet.schedulable(SCOPE)] == [2]
    fleet.order(1, "schedulable")
    assert [w.worker_id for w in fleet.schedulable(SCOPE)] == [1, 2]


def test_scopes_are_apart(fleet):
    with_workers(fleet, 1)
    assert fleet.schedulable(Scope("default", "other")) == []


@pytest.mark.parametrize("stranger", [report(2), report(1, dp_rank=1), report(1, incarnation=2)])
def test_reports_of_nobody_announced_are_not_heard(fleet, stranger):
    fleet.put(announcement(1), 0.0)
    assert not fleet.expects(stranger)
    assert fleet.schedulable_count() == 0


def test_a_changed_announcement_keeps_what_was_heard(fleet):
    fleet.put(announcement(1, data_parallel_size=2), 0.0)
    fleet.hear(report(1, 0), 1.0)
    fleet.hear(report(1, 1), 1.0)
    fleet.put(announcement(1, data_parallel_size=1), 2.0)
    assert list(fleet.get(1).reports) == [rank(1, 0)]
    assert fleet.is_schedulable(fleet.get(1))


def test_a_new_life_has_to_be_heard_anew(fleet):
    with_workers(fleet, 1)
    fleet.put(announcement(1, incarnation=2), 5.0)
    assert fleet.schedulable_count() == 0

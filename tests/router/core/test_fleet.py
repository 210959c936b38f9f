"""Workers that exist, may be chosen, or are removed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.core.fleet import Fleet, LivenessLimits
from router.core.registered_workers import EventSource, ImplicitWorker
from router.protocol.values import I64_MAX, Scope
from support.values.builders import announcement, rank, report

LIMITS = LivenessLimits(silence_s=2.5, heartbeat_s=1.0, freeze_s=30.0)
SCOPE = Scope("default", "default")


@pytest.fixture
def fleet():
    fleet = Fleet(LIMITS)
    fleet.set_connected(True, 0.0)
    return fleet


def with_workers(fleet, count, last_seen_s=0.0, **fields):
    for worker_id in range(1, count + 1):
        fleet.put(announcement(worker_id, **fields), 0.0)
        fleet.record_report(report(worker_id), last_seen_s)


def gone(fleet, now_s):
    return [worker.worker_id for worker in fleet.take_gone(now_s)]


def test_announced_engine_is_schedulable_after_its_first_report(fleet):
    fleet.put(announcement(1), 0.0)
    assert fleet.schedulable(SCOPE) == []
    fleet.record_report(report(1), 0.5)
    assert [w.worker_id for w in fleet.schedulable(SCOPE)] == [1]


def test_announced_engine_without_reports_is_removed(fleet):
    fleet.put(announcement(1), 0.0)
    assert gone(fleet, 2.4) == []
    assert gone(fleet, 2.6) == [1]


def test_forged_report_id_does_not_silence_a_worker_for_good(fleet):
    fleet.put(announcement(1), 0.0)
    fleet.record_report(report(1, report_id=I64_MAX), 1.0)
    for made_after_s in (None, 0.9, 1.0):
        assert not fleet.record_report(report(1), 2.0, made_after_s)
    assert fleet.record_report(report(1), 2.0, 1.1)
    assert (gone(fleet, 4.4), fleet.stale_reports) == ([], 3)


def test_worker_is_removed_past_the_silence_limit(fleet):
    with_workers(fleet, 3)
    fleet.record_report(report(2), 1.2)
    fleet.record_report(report(3), 1.9)
    assert gone(fleet, 2.5) == []
    assert gone(fleet, 2.6) == [1]
    assert len(fleet) == 2


def test_silent_agent_beside_a_live_engine_is_kept(fleet):
    with_workers(fleet, 1, agent_is_engine=False)
    assert gone(fleet, 60.0) == []
    worker = fleet.get(1)
    assert fleet.is_schedulable(worker)
    assert fleet.silence_s(worker, 60.0) == 60.0


def test_no_worker_is_removed_while_disconnected(fleet):
    with_workers(fleet, 3)
    fleet.set_connected(False, 1.0)
    assert gone(fleet, 60.0) == []
    assert fleet.silence_s(fleet.get(1), 60.0) is None


def test_workers_get_a_full_timeout_after_a_disconnection(fleet):
    with_workers(fleet, 3)
    fleet.set_connected(False, 1.0)
    fleet.set_connected(True, 60.0)
    fleet.record_report(report(1), 61.5)
    fleet.record_report(report(2), 62.0)
    assert gone(fleet, 62.4) == []
    assert gone(fleet, 62.6) == [3]


def test_when_most_fall_silent_together_liveness_freezes(fleet):
    with_workers(fleet, 5)
    for worker_id in (4, 5):
        fleet.record_report(report(worker_id), 2.4)
    fleet.record_report(report(3), 0.9)
    assert gone(fleet, 2.6) == []
    assert fleet.is_frozen
    assert fleet.schedulable_count() == 5


def test_freeze_ends_when_reports_return(fleet):
    with_workers(fleet, 3)
    assert gone(fleet, 2.6) == []
    for worker_id in (1, 2, 3):
        fleet.record_report(report(worker_id), 5.0)
    assert gone(fleet, 5.1) == []
    assert not fleet.is_frozen


def test_a_freeze_does_not_last_for_ever(fleet):
    with_workers(fleet, 3)
    assert gone(fleet, 2.6) == []
    assert gone(fleet, 32.5) == []
    assert gone(fleet, 32.7) == [1, 2, 3]


def test_workers_without_reports_do_not_freeze_removals(fleet):
    """A whole fleet died while we were down; its announcements are still there."""
    for worker_id in range(1, 6):
        fleet.put(announcement(worker_id), 0.0)
    assert gone(fleet, 2.6) == [1, 2, 3, 4, 5]


def test_quiet_workers_that_promise_no_reports_do_not_freeze_it(fleet):
    """Workers of another fleet speak only when something changes."""
    with_workers(fleet, 1)
    for worker_id in (7, 8, 9):
        fields = structs.asdict(announcement(worker_id, agent_is_engine=False))
        heard_from = EventSource("dynamo://ns/backend")
        fleet.put(ImplicitWorker(**fields, dp_ranks=(0,), heard_from=heard_from), 0.0)
        fleet.record_report(report(worker_id), 0.0)
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
def test_reports_of_unannounced_ranks_are_ignored(fleet, stranger):
    fleet.put(announcement(1), 0.0)
    assert not fleet.expects(stranger)
    assert fleet.schedulable_count() == 0


def test_changed_announcement_keeps_reports_of_remaining_ranks(fleet):
    fleet.put(announcement(1, data_parallel_size=2), 0.0)
    fleet.record_report(report(1, 0), 1.0)
    fleet.record_report(report(1, 1), 1.0)
    fleet.put(announcement(1, data_parallel_size=1), 2.0)
    assert list(fleet.get(1).reports) == [rank(1, 0)]
    assert fleet.is_schedulable(fleet.get(1))


def test_new_incarnation_needs_a_new_report(fleet):
    with_workers(fleet, 1)
    fleet.put(announcement(1, incarnation=2), 5.0)
    assert fleet.schedulable_count() == 0


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["put", "other scope", "report", "remove", "cordoned", "schedulable", "ill"]
        ),
        st.integers(1, 4),
    ),
    max_size=20,
)


@given(CHANGES)
def test_schedulable_workers_and_ranks_of_scopes_equal_slow_count(changes):
    fleet = Fleet(LIMITS)
    for what, worker_id in changes:
        if what in ("put", "other scope"):
            fields = {"routing_group": "g", "data_parallel_size": 2} if what != "put" else {}
            fleet.put(announcement(worker_id, **fields), 0.0)
        elif what == "report" and fleet.get(worker_id) is not None:
            fleet.record_report(report(worker_id), 0.0)
        elif what == "remove":
            fleet.remove(worker_id)
        elif what == "ill":
            fleet.set_problem(worker_id, None if fleet.schedulable_count() else "ill")
        elif what != "report":
            fleet.order(worker_id, what)
        able = [worker for worker in fleet if fleet.is_schedulable(worker)]
        assert fleet.schedulable_count() == len(able)
        scopes = {worker.announcement.scope for worker in fleet}
        assert set(fleet.scopes()) == scopes
        for scope, here in fleet.scopes().items():
            workers = [worker for worker in fleet if worker.announcement.scope == scope]
            assert here.ranks == [each for w in workers for each in w.announcement.ranks]
            assert fleet.schedulable(scope) == [w.announcement for w in workers if w in able]
            assert here.unschedulable == [w for w in workers if w not in able]

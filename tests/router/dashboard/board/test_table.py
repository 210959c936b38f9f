import pytest

from router.core.commands import (
    OrderWorker,
    RemoveWorker,
    SetSourceFault,
    StreamLost,
    UpsertRegistered,
)
from router.core.registered_workers import complete_worker
from router.dashboard.board.decision_feed import DecisionFeed
from router.dashboard.board.table import RANKS_A_TURN, SLICE_RANKS, Table
from router.indexer.rank_index import SourceFault
from router.observability.event_timeline import EventTimeline
from router.protocol.catalogue import WorkerLabels
from router.protocol.workers import WorkerRegistration
from support.values.builders import World, rank


@pytest.fixture
def world():
    return World()


def table(world):
    timeline = EventTimeline(lambda: 0.0)
    return Table(world.core, DecisionFeed(), timeline), timeline


def look(table, now_s=0.0):
    for _ in table.look(now_s):
        pass
    return table.take_changed()


def test_first_look_has_all_rows_and_later_ones_changes(world):
    labels = WorkerLabels(taints=["spot"], topology_domains={"zone": "a"})
    world.worker(2**63, data_parallel_size=2, labels=labels)
    lines, _ = table(world)
    (worker,), ranks = look(lines)
    assert (worker.worker_id, worker.lifecycle, worker.labels) == (
        str(2**63),
        "schedulable",
        ["spot", "zone=a"],
    )
    assert [(each.dp_rank, each.trust) for each in ranks] == [(0, "exact"), (1, "exact")]
    assert look(lines) == ([], [])
    world.cache(rank(2**63, 1), [*range(8)])
    assert [each.device_blocks for each in look(lines)[1]] == [2]


def test_estimates_by_choice_are_told_from_those_of_dead_sockets(world):
    for worker_id, socket in ((1, None), (2, "tcp://e:2")):
        registration = WorkerRegistration(
            worker_id=worker_id, endpoint="http://w", block_size=4, kv_events_endpoint=socket
        )
        world.core.handle(UpsertRegistered(complete_worker(registration, 1)), 0.0)
    world.core.handle(SetSourceFault(rank(2), SourceFault("dead", "estimate")), 0.0)
    lines, _ = table(world)
    shown = {each.worker_id: each for each in look(lines)[1]}
    assert [each.trust for each in shown.values()] == ["approximate", "approximate"]
    assert (shown["1"].is_without_events, shown["2"].is_without_events) == (True, False)
    assert shown["2"].reason == "dead"


def test_removed_workers_are_reported_once(world):
    for worker_id in (1, 2):
        world.worker(worker_id)
    lines, _ = table(world)
    look(lines)
    world.core.handle(RemoveWorker(1, "test"), 0.0)
    look(lines)
    assert lines.take_gone() == (["1"], [("1", 0)])
    assert lines.take_gone() == ([], [])
    assert list(lines.ranks) == [rank(2)]


def test_timeline_notes_joined_workers_and_lost_trust(world):
    world.worker(1)
    lines, timeline = table(world)
    look(lines)
    assert timeline.since(0) == []
    world.worker(2)
    world.core.handle(StreamLost(), 0.0)
    look(lines)
    world.core.handle(OrderWorker(1, "cordoned"), 0.0)
    look(lines)
    reported = [(each.kind, each.severity, each.about) for each in timeline.since(0)]
    assert ("worker_joined", "good", "2") in reported
    assert ("trust_lost", "warning", "1.0") in reported
    assert ("lifecycle", "note", "1") in reported


def test_regained_trust_is_noted(world):
    world.worker(1)
    lines, timeline = table(world)
    look(lines)
    world.core.handle(StreamLost(), 0.0)
    look(lines)
    world.worker(1, incarnation=2)
    look(lines)
    assert [each.kind for each in timeline.since(0)] == ["trust_lost", "trust_regained"]


def test_many_ranks_are_refreshed_in_turn(world):
    world.worker(1, data_parallel_size=RANKS_A_TURN + 10)
    lines, _ = table(world)
    slices = sum(1 for _ in lines.look(0.0))
    assert len(lines.take_changed()[1]) == RANKS_A_TURN + 10
    assert slices >= (RANKS_A_TURN + 10) / SLICE_RANKS
    for dp_rank in range(RANKS_A_TURN + 10):
        world.cache(rank(1, dp_rank), [*range(4)])
    first, rest = look(lines)[1], look(lines)[1]
    assert len(first) == RANKS_A_TURN
    assert len({each.dp_rank for each in (*first, *rest)}) == RANKS_A_TURN + 10

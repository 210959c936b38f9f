"""Workers that publish: what the core gets of them, and when they are removed."""

import pytest

from router.core.commands import RemoveWorker, Resume, UpsertWorker
from router.core.effects import WorkerGone
from router.indexer.snapshot import RankSnapshot
from router.protocol.events import Checkpoint
from router.protocol.replies import TrustState
from router.protocol.values import Rank, Scope
from support.fleets.dynamo_fleets import FollowedFleet
from support.values.builders import announcement


@pytest.fixture
def heard():
    return FollowedFleet()


def test_rank_with_events_becomes_a_worker_of_its_scope(heard):
    heard.store(1, 2)
    (worker,) = heard.core.fleet.schedulable(Scope("m", "g"))
    assert (worker.worker_id, worker.endpoint) == (7, "dynamo://ns/backend/7")
    assert (heard.held(), heard.trust().state) == (2, TrustState.LAGGING)


def test_gauges_are_the_last_reported(heard):
    heard.load(active_decode_blocks=18, active_prefill_tokens=5)
    heard.load(active_prefill_tokens=6)
    heard.load(kv_used_blocks=20, active_decode_blocks=1)
    assert (heard.gauges().kv_used_blocks, heard.gauges().waiting_uncached_tokens) == (20, 6)


def test_load_alone_leaves_blocks_unknown(heard):
    heard.load(kv_used_blocks=20)
    assert heard.trust().state is TrustState.BLIND
    heard.store(1)
    assert heard.trust().state is TrustState.LAGGING


def test_a_snapshot_of_our_own_does_not_restore_it(heard):
    """Events in between are unknown: its history continues from somewhere else."""
    heard.store(1, 2)
    (state,) = heard.core.index.rank_states()
    heard.fleet.tick(60.0)
    heard.load(now_s=61.0)
    assert not heard.core.handle(Resume.of(RankSnapshot(state, [])), 61.0)[0]
    assert heard.trust(now_s=61.0).state is TrustState.BLIND


def test_loads_of_others_in_the_namespace_are_passed_over(heard):
    heard.load(may_appear=False)
    assert (len(heard.fleet), heard.fleet.counts.unknown_loads) == (0, 1)


def test_doubt_is_reported_without_further_events(heard):
    heard.store(1)
    heard.store(3, parent=2, event_id=2, now_s=1.0)
    assert heard.trust(now_s=1.0).state is TrustState.LAGGING
    heard.fleet.tick(9.0)
    heard.tell(9.0)
    assert heard.trust(now_s=9.0).reason == "blocks with unknown parents"


def test_silent_worker_is_removed_and_returns_empty(heard):
    heard.store(1, 2)
    heard.load(now_s=30.0)
    assert heard.fleet.tick(89.0) == []
    (gone,) = heard.fleet.tick(90.0)
    assert gone == WorkerGone(7, "silent", 0)
    assert (len(heard.fleet), heard.core.fleet.get(7)) == (0, None)
    heard.store(3, parent=2, event_id=2, now_s=91.0)
    assert heard.trust(now_s=91.0).state is TrustState.DEGRADED
    assert heard.fleet.rank_counts().lives == 2


def test_restarted_timeouts_keep_silent_workers(heard):
    heard.store(1)
    heard.fleet.restart_timeouts(100.0)
    assert heard.fleet.tick(120.0) == []


def test_a_forward_pass_is_a_sign_of_life(heard):
    heard.store(1)
    heard.fleet.note_message(7, 50.0)
    heard.fleet.note_message(8, 50.0)
    assert heard.fleet.tick(80.0) == []


def test_removed_worker_returns_empty_and_degraded(heard):
    heard.store(1, 2)
    heard.core.handle(RemoveWorker(7, "removed"), 0.0)
    heard.store(3, event_id=2)
    assert (heard.held(), heard.trust().state) == (1, TrustState.DEGRADED)


def test_ranks_beyond_the_limit_and_ids_of_others_are_refused_in_words(heard):
    heard.core.handle(UpsertWorker(announcement(9)), 0.0)
    for worker_id in (7, 8, 9, 10):
        heard.store(1, worker_id=worker_id)
    assert heard.fleet.counts.refused_ranks == 2
    reported = " ".join(heard.fleet.complaints.take(0.0))
    assert "rank 9.0 is not followed: another worker" in reported
    assert "rank 10.0 is not followed: the limit is reached (dynamo_max_ranks: 2)" in reported
    assert heard.core.fleet.get(10) is None


def test_required_checkpoint_is_sent_again(heard):
    heard.store(1, 2)
    assert heard.fleet.require_checkpoint(Rank(7, 0))
    assert heard.fleet.take_changed() == [Rank(7, 0)]
    (message,) = heard.fleet.take_messages(Rank(7, 0))
    assert isinstance(message, Checkpoint)
    assert message.state.counts[0] == 2
    assert not heard.fleet.require_checkpoint(Rank(99, 0))


def test_a_refused_event_is_named(heard):
    heard.store(1, 1)
    (sentence,) = heard.fleet.complaints.take(0.0)
    reason = "a block occurs twice, or is its own parent"
    assert sentence == f"rank 7.0: event 1: stored event refused: {reason}"

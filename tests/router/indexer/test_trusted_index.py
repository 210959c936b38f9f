"""The index and how far it can be believed."""

import numpy as np
import pytest
from msgspec.structs import replace

from oracle.index import ExactIndex
from router.indexer.event_log import LogVerdict
from router.indexer.radix_tree.radix_tree import RadixTree
from router.indexer.slices import FILL_SLICE_BLOCKS, SLICE_BLOCKS
from router.indexer.trusted_index import TrustedIndex
from router.protocol.events import (
    Checkpoint,
    ClassBlocks,
    ClassStored,
    EventBatch,
    Stored,
    TierBlocks,
    pack_batch,
)
from router.protocol.hybrid import HybridState, LayerClass, Layout
from router.protocol.loads import LoadReport
from router.protocol.replies import TrustState
from router.protocol.values import (
    SCHEME,
    Doubt,
    HeldState,
    Identity,
    Rank,
    Scope,
    Tier,
    pack_hashes,
)
from router.publisher.journal.journal import EventJournal
from router.sequence.hashing._digest import digest

RANK, SCOPE, IDENTITY = Rank(1, 0), Scope("m", "g"), Identity(SCHEME, 16)


class Edge:
    """A rank's journal, and an index that follows it."""

    def __init__(self, make_indexer, incarnation=1, identity=IDENTITY):
        self.indexers = []
        self.index = TrustedIndex(lambda: self.indexers.append(make_indexer()) or self.indexers[-1])
        self.index.add_rank(RANK, SCOPE, IDENTITY, now_s=0.0)
        self.restart(incarnation, identity)

    def restart(self, incarnation, identity=IDENTITY):
        self.incarnation = incarnation
        self.journal = EventJournal(RANK, incarnation, identity)

    def deliver(self, now_s=0.0):
        """Deliver what is noted, and a report that says that there is no more."""
        verdicts = [self.index.apply(message, now_s) for message in self.journal.take()]
        if verdicts != [None]:
            self.index.compare(self.report(), now_s, now_s)
        return verdicts

    def report(self, **changes):
        fields = {
            "worker_id": 1,
            "dp_rank": 0,
            "agent_incarnation": self.incarnation,
            "incarnation": self.incarnation,
            "report_id": 1,
            "event_id": self.journal.last_event_id,
            "state": self.journal.taken_state,
        }
        return LoadReport(**{**fields, **changes})

    def overlap(self, *hashes):
        prompt = np.array(hashes, dtype=np.uint64)
        scores = self.index.find_matches(SCOPE, prompt)
        return scores[RANK].device if RANK in scores else 0

    def trust(self, now_s=0.0):
        return self.index.trust(RANK, now_s)


def digest_of(*hashes):
    return digest(np.array(hashes, dtype=np.uint64))


@pytest.fixture(params=[RadixTree, ExactIndex])
def edge(request):
    return Edge(request.param)


def test_a_rank_is_blind_then_exact(edge):
    assert edge.trust().state is TrustState.BLIND
    edge.journal.stored(Tier.DEVICE, [1, 2], None)
    assert edge.deliver(now_s=1.0) == [LogVerdict.NEW_LIFE]
    trust = edge.trust(now_s=1.5)
    assert (trust.state, trust.event_id, trust.age_s) == (TrustState.EXACT, 1, 0.5)
    assert edge.overlap(1, 2, 3) == 2


def test_follows_stores_removals_and_clears(edge):
    edge.deliver()
    edge.journal.stored(Tier.DEVICE, [1, 2, 3], None)
    edge.deliver()
    edge.journal.removed(Tier.DEVICE, [3])
    assert edge.deliver() == [LogVerdict.APPLY]
    assert edge.overlap(1, 2, 3) == 2
    edge.journal.cleared()
    edge.deliver()
    assert edge.overlap(1, 2, 3) == 0
    assert edge.trust().state is TrustState.EXACT


def test_a_lost_batch_degrades_until_a_checkpoint(edge):
    edge.deliver()
    edge.journal.stored(Tier.DEVICE, [1], None)
    edge.journal.take()
    edge.journal.stored(Tier.DEVICE, [2], 1)
    assert edge.deliver(now_s=5.0) == [LogVerdict.GAP]
    assert edge.trust().state is TrustState.DEGRADED
    assert edge.index.take_wanted_checkpoints(5.9) == []
    assert edge.index.take_wanted_checkpoints(6.0) == [(RANK, "events missing")]
    edge.journal.require_checkpoint()
    assert edge.deliver() == [LogVerdict.APPLY]
    assert edge.trust().state is TrustState.EXACT
    assert edge.overlap(1, 2) == 2


def test_a_wanted_checkpoint_is_asked_for_again_but_not_at_once(edge):
    wanted = [bool(edge.index.take_wanted_checkpoints(t)) for t in (0.5, 1.0, 1.5, 2.5, 3.0)]
    assert wanted == [False, True, False, False, True]


def test_a_state_that_does_not_add_up_is_noticed(edge):
    edge.journal.stored(Tier.DEVICE, [1, 2], None)
    edge.deliver()
    edge.indexers[-1].store(RANK, Tier.DEVICE, np.array([99], dtype=np.uint64))
    edge.journal.stored(Tier.DEVICE, [3], 2)
    edge.deliver()
    trust = edge.trust()
    assert (trust.state, trust.reason) == (TrustState.DEGRADED, "digest differs")


def test_silent_drift_is_noticed_by_a_report(edge):
    edge.journal.stored(Tier.DEVICE, [1, 2], None)
    edge.deliver()
    edge.index.compare(edge.report(), 1.0, now_s=1.0)
    assert edge.trust().state is TrustState.EXACT
    edge.indexers[-1].remove(RANK, Tier.DEVICE, np.array([2], dtype=np.uint64))
    edge.index.compare(edge.report(), 2.0, now_s=2.0)
    assert edge.trust().state is TrustState.DEGRADED


def test_a_report_ahead_of_the_index_means_lagging(edge):
    edge.deliver()
    edge.journal.stored(Tier.DEVICE, [1], None)
    messages = edge.journal.take()
    edge.index.compare(edge.report(), 1.0, now_s=1.0)
    assert edge.trust().state is TrustState.LAGGING
    edge.index.apply(messages[0], 1.1)
    assert edge.trust().state is TrustState.EXACT
    assert edge.index.take_wanted_checkpoints(10.0) == []


def test_unconfirmed_rank_is_not_exact(edge):
    (message,) = edge.journal.take()
    edge.index.apply(message, 0.0)
    assert edge.trust().reason == "no report confirms it"
    edge.index.compare(edge.report(), None, now_s=0.0)
    assert edge.trust().reason == "no report confirms it"
    edge.index.compare(edge.report(), 2.0, now_s=2.5)
    assert edge.trust(now_s=3.0).state is TrustState.EXACT
    trust = edge.trust(now_s=3.1)
    assert (trust.state, trust.age_s) == (TrustState.LAGGING, 1.1)
    assert trust.reason == "last confirmed 1.1 s ago"


def test_a_report_of_another_life_means_lagging(edge):
    edge.deliver()
    edge.index.compare(edge.report(incarnation=2), 0.5, now_s=0.5)
    trust = edge.trust(now_s=0.6)
    assert (trust.state, trust.reason) == (TrustState.LAGGING, "its cache has begun a new life")


def test_doubts_of_the_agent_are_shown(edge):
    doubted = HeldState(doubts=Doubt.ORPHANS | Doubt.HYBRID)
    edge.deliver()
    edge.index.compare(edge.report(state=doubted), 0.0, now_s=0.0)
    trust = edge.trust()
    assert (trust.state, trust.reason) == (
        TrustState.DEGRADED,
        "blocks with unknown parents; hybrid model: overlap is an upper bound",
    )
    edge.index.compare(edge.report(), 0.0, now_s=0.0)
    assert edge.trust().state is TrustState.EXACT


def test_doubts_come_with_messages_too(edge):
    edge.deliver()
    stored = Stored(Tier.DEVICE, pack_hashes(np.array([1], dtype=np.uint64)))
    state = HeldState((0, 0, 0, 0), (1, 0, 0, 0), (digest_of(1), 0, 0, 0), Doubt.COPIES)
    batch = EventBatch(1, 0, 1, IDENTITY, 1, 1, pack_batch(state, [stored]))
    assert edge.index.apply(batch, 0.0) is LogVerdict.APPLY
    assert edge.trust().reason == "more copies reported than the engine has blocks"
    edge.index.compare(edge.report(event_id=0), 0.0, now_s=0.0)
    assert edge.trust().state is TrustState.DEGRADED


@pytest.mark.parametrize(
    ("doubts", "reason"),
    [
        (Doubt.UNKNOWN_FIELDS, "unknown fields in engine events"),
        (Doubt.ORPHANS | 1 << 40, f"blocks with unknown parents; doubt {1 << 40}"),
    ],
)
def test_doubts_of_newer_agents_degrade_the_rank(edge, doubts, reason):
    edge.deliver()
    state = HeldState((0, 0, 0, 0), (1, 0, 0, 0), (digest_of(1), 0, 0, 0), doubts)
    stored = pack_batch(state, [Stored(Tier.DEVICE, pack_hashes(np.array([1], dtype=np.uint64)))])
    edge.index.apply(EventBatch(1, 0, 1, IDENTITY, 1, 1, stored), 0.0)
    assert (edge.trust().state, edge.trust().reason) == (TrustState.DEGRADED, reason)


WINDOW = Layout(16, 16, (LayerClass("window", 16, 33),))


def hybrid_checkpoint(event_id, layout, full, held, doubts=Doubt.HYBRID):
    """What a rank holds: blocks of full attention, and of its only class."""
    state = HeldState(counts=(len(full), 0, 0, 0), digests=(digest_of(*full), 0, 0, 0))
    hybrid = layout and HybridState(layout, (len(held),), (digest_of(*held),))
    blocks = (TierBlocks(Tier.DEVICE, pack_hashes(hash_array(full))),)
    classes = (ClassBlocks(0, pack_hashes(hash_array(held))),)
    fields = (blocks, replace(state, doubts=doubts), hybrid, classes)
    return Checkpoint(1, 0, 1, IDENTITY, event_id, 0, 1, *fields)


def hash_array(hashes):
    return np.array(hashes, dtype=np.uint64)


def resumable(edge, *hashes):
    scores = edge.index.resumable(SCOPE, hash_array(hashes), 16 * len(hashes) + 1, 16)
    return scores[RANK].device


def confirmed_trust(edge, event_id, doubts=Doubt.HYBRID, **changes):
    state = edge.index.held_state(RANK)
    report = edge.report(event_id=event_id, state=replace(state, doubts=doubts), **changes)
    edge.index.compare(report, 0.0, now_s=0.0)
    return edge.trust()


def test_a_hybrid_rank_that_says_where_prompts_resume_is_exact(edge):
    edge.index.apply(hybrid_checkpoint(1, WINDOW, [1, 2, 3, 4], [2, 3]), 0.0)
    assert confirmed_trust(edge, 1).state is TrustState.EXACT
    assert (edge.overlap(1, 2, 3, 4), resumable(edge, 1, 2, 3, 4)) == (4, 3)
    assert edge.index.layout(RANK) == WINDOW
    assert [state.hybrid.layout for state in edge.index.rank_states()] == [WINDOW]


def test_a_problem_of_the_layout_degrades_until_it_is_gone(edge):
    unknown = replace(WINDOW, problem="chunk size is not told")
    edge.index.apply(hybrid_checkpoint(1, unknown, [1, 2], [2], Doubt(0)), 0.0)
    assert confirmed_trust(edge, 1, Doubt.COPIES).reason == (
        "hybrid model: chunk size is not told; more copies reported than the engine has blocks"
    )
    edge.index.apply(batch_of_class(2, WINDOW, [1, 2], [2, 3]), 0.0)
    assert confirmed_trust(edge, 2).state is TrustState.EXACT


def test_a_hybrid_rank_without_classes_in_its_messages_is_an_upper_bound(edge):
    edge.index.apply(hybrid_checkpoint(1, WINDOW, [1, 2], [2]), 0.0)
    edge.index.apply(hybrid_checkpoint(2, None, [1, 2], []), 0.0)
    assert confirmed_trust(edge, 2).reason == "hybrid model: overlap is an upper bound"
    assert edge.index.layout(RANK) is None
    assert resumable(edge, 1, 2) == 2


def batch_of_class(event_id, layout, full, held):
    """The last block of a class is new; the sums are those of all that is named."""
    state = HeldState(counts=(len(full), 0, 0, 0), digests=(digest_of(*full), 0, 0, 0))
    hybrid = HybridState(layout, (len(held),), (digest_of(*held),))
    packed = pack_batch(state, [ClassStored(0, pack_hashes(hash_array(held[-1:])))])
    return EventBatch(1, 0, 1, IDENTITY, event_id, event_id, packed, hybrid)


def test_a_class_that_does_not_add_up_is_healed_by_a_checkpoint(edge):
    edge.index.apply(hybrid_checkpoint(1, WINDOW, [1, 2], [2]), 0.0)
    edge.index.apply(batch_of_class(2, WINDOW, [1, 2], [7, 2, 3]), 0.0)
    assert edge.trust().reason == "digest differs"
    assert edge.index.take_wanted_checkpoints(9.0) == [(RANK, "digest differs")]
    edge.index.apply(hybrid_checkpoint(2, WINDOW, [1, 2], [7, 2, 3]), 0.0)
    assert confirmed_trust(edge, 2).state is TrustState.EXACT


def test_classes_of_a_checkpoint_without_a_layout_are_ignored(edge):
    edge.index.apply(hybrid_checkpoint(1, None, [1, 2], [1, 2], Doubt(0)), 0.0)
    assert confirmed_trust(edge, 1, Doubt(0)).state is TrustState.EXACT


def test_doubts_of_one_life_are_not_those_of_the_next(edge):
    for block in range(5):
        edge.journal.stored(Tier.DEVICE, [block], None)
        edge.deliver()
    edge.restart(incarnation=2)
    edge.journal.set_doubts(Doubt.EVENTS_LOST)
    edge.journal.stored(Tier.DEVICE, [1], None)
    early = edge.report(event_id=0, state=HeldState(doubts=Doubt.EVENTS_LOST))
    edge.deliver()
    edge.index.compare(early, 0.0, now_s=0.0)
    assert edge.trust().reason == "engine events lost, and no replay"


def test_a_lasting_lag_asks_for_a_checkpoint(edge):
    edge.deliver()
    edge.journal.stored(Tier.DEVICE, [1], None)
    edge.journal.take()
    edge.index.compare(edge.report(), 1.0, now_s=1.0)
    assert edge.index.take_wanted_checkpoints(2.0) == [(RANK, "behind its reports")]


def test_a_report_that_agrees_settles_a_doubt(edge):
    edge.deliver()
    edge.index.compare(edge.report(event_id=5), 1.0, now_s=1.0)
    edge.index.compare(edge.report(), 1.5, now_s=1.5)
    assert edge.index.take_wanted_checkpoints(9.0) == []


def test_a_new_life_forgets_the_old(edge):
    edge.journal.stored(Tier.DEVICE, [1, 2], None)
    edge.deliver()
    edge.restart(incarnation=2)
    edge.journal.stored(Tier.DEVICE, [1], None)
    assert edge.deliver() == [LogVerdict.NEW_LIFE]
    assert edge.overlap(1, 2) == 1
    assert edge.index.incarnation(RANK) == 2


def test_lost_stream_degrades_every_rank(edge):
    edge.journal.stored(Tier.DEVICE, [1], None)
    edge.deliver()
    edge.index.stream_lost([RANK], now_s=3.0)
    assert edge.trust().state is TrustState.DEGRADED
    assert edge.overlap(1) == 1
    edge.journal.require_checkpoint()
    edge.deliver()
    assert edge.trust().state is TrustState.EXACT


@pytest.mark.parametrize(
    "identity", [Identity(SCHEME, 32), Identity(SCHEME, 16, eagle=True), Identity("sha256", 16)]
)
def test_events_of_another_identity_are_refused(identity):
    edge = Edge(RadixTree, identity=identity)
    edge.journal.stored(Tier.DEVICE, [1], None)
    assert edge.deliver() == [LogVerdict.FOREIGN]
    assert edge.overlap(1) == 0
    assert edge.trust().state is TrustState.BLIND


def test_an_unknown_scheme_is_blind_even_if_announced():
    edge = Edge(RadixTree)
    edge.index.add_rank(RANK, SCOPE, Identity("sha256", 16), now_s=0.0)
    edge.restart(1, Identity("sha256", 16))
    edge.journal.stored(Tier.DEVICE, [1], None)
    assert edge.deliver() == [LogVerdict.FOREIGN]
    assert "sha256" in edge.trust().reason


def test_events_of_a_dropped_rank_return_none(edge):
    edge.index.drop_rank(RANK)
    assert edge.deliver() == [None]
    assert edge.index.stats() == {}


def test_scopes_do_not_meet(edge):
    edge.journal.stored(Tier.DEVICE, [1], None)
    edge.deliver()
    assert edge.index.find_matches(Scope("m", "other"), np.array([1], dtype=np.uint64)) == {}


def test_an_index_goes_with_its_last_rank(edge):
    edge.journal.stored(Tier.DEVICE, [1], None)
    edge.deliver()
    assert edge.index.stats()[SCOPE].blocks == 1
    edge.index.drop_rank(RANK)
    assert edge.index.stats() == {}
    assert edge.overlap(1) == 0


def test_dumps_what_is_held(edge):
    edge.journal.stored(Tier.DEVICE, [1, 2], None)
    edge.journal.stored(Tier.DISK, [2], 1)
    edge.deliver()
    dumped = {(scope, h.tier): sorted(h.sequence_hashes.tolist()) for scope, h in edge.index.dump()}
    assert dumped == {(SCOPE, Tier.DEVICE): [1, 2], (SCOPE, Tier.DISK): [2]}


def test_an_empty_state_needs_no_checkpoint_content(edge):
    assert edge.deliver() == [LogVerdict.NEW_LIFE]
    assert edge.journal.taken_state == HeldState()
    assert edge.trust().state is TrustState.EXACT


# ── Long messages, in slices ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def long_edge():
    """An edge whose next message names three slices of blocks."""
    edge = Edge(lambda: RadixTree(1 << 14, sub_bits=2))
    edge.deliver()
    blocks = list(range(1, 3 * SLICE_BLOCKS + 1))
    edge.journal.stored(Tier.DEVICE, blocks, None)
    return edge


def drain(edge):
    slices = 0
    while edge.index.apply_slice():
        slices += 1
    return slices


def test_a_long_message_is_applied_in_slices_and_believed_with_the_last(long_edge):
    prompt = range(1, 3 * SLICE_BLOCKS + 1)
    assert long_edge.deliver() == [LogVerdict.APPLY]
    assert long_edge.overlap(*prompt) == SLICE_BLOCKS
    trust = long_edge.trust()
    assert (trust.state, trust.event_id) == (TrustState.LAGGING, 0)
    assert trust.reason == "a message is being applied"
    assert 0 < drain(long_edge) <= 3
    assert long_edge.overlap(*prompt) == 3 * SLICE_BLOCKS
    assert long_edge.trust().state is TrustState.EXACT


def test_a_long_checkpoint_is_switched_to_when_it_is_whole(long_edge):
    long_edge.deliver()
    drain(long_edge)
    long_edge.journal.removed(Tier.DEVICE, [1])
    long_edge.journal.require_checkpoint()
    assert long_edge.deliver() == [LogVerdict.APPLY]
    assert long_edge.overlap(1, 2) == 2
    assert drain(long_edge)
    assert long_edge.overlap(1, 2) == 0
    assert long_edge.trust().state is TrustState.EXACT


def test_the_next_message_of_a_rank_waits_for_the_rest_of_the_last(long_edge):
    long_edge.deliver()
    long_edge.journal.removed(Tier.DEVICE, [3 * SLICE_BLOCKS])
    assert long_edge.deliver() == [LogVerdict.APPLY]
    assert not long_edge.index.apply_slice()
    assert long_edge.trust().state is TrustState.EXACT
    assert long_edge.overlap(*range(1, 3 * SLICE_BLOCKS + 1)) == 3 * SLICE_BLOCKS - 1


def test_checkpoints_of_a_fill_are_staged_in_longer_slices(long_edge):
    long_edge.deliver()
    long_edge.journal.stored(Tier.DEVICE, range(1, 2 * FILL_SLICE_BLOCKS + 1), None)
    long_edge.journal.require_checkpoint()
    long_edge.index.begin_fill()
    long_edge.deliver()
    assert drain(long_edge) <= 2
    assert not long_edge.index.settle(1, now_s=0.0)
    long_edge.journal.removed(Tier.DEVICE, [1])
    long_edge.journal.require_checkpoint()
    long_edge.deliver()
    assert drain(long_edge) >= FILL_SLICE_BLOCKS // SLICE_BLOCKS
    assert long_edge.trust().state is TrustState.EXACT


def test_a_fill_makes_room_for_every_rank_until_it_has_ended():
    tree = RadixTree(1 << 14, sub_bits=2)
    edge = Edge(lambda: tree)
    for worker_id in range(2, 11):
        edge.index.add_rank(Rank(worker_id, 0), SCOPE, IDENTITY, now_s=0.0)
    assert tree.expected_ranks == 0
    edge.index.begin_fill()
    assert tree.expected_ranks == 10
    assert not edge.index.settle(1, now_s=0.0)
    assert tree.expected_ranks == 0


def test_a_rank_that_goes_takes_its_unfinished_message_along(long_edge):
    long_edge.deliver()
    long_edge.index.drop_rank(RANK)
    assert not long_edge.index.apply_slice()
    assert long_edge.index.stats() == {}


# ── The limit on blocks ──────────────────────────────────────────────────────────────────────────


def test_a_rank_that_does_not_fit_is_degraded_and_asks_when_there_is_room():
    edge, other = Edge(lambda: RadixTree(1000, sub_bits=1)), Rank(2, 0)
    edge.index.add_rank(other, SCOPE, IDENTITY, now_s=0.0)
    journal = EventJournal(other, 1, IDENTITY)
    journal.stored(Tier.DEVICE, list(range(5000, 5900)), None)
    for message in journal.take():
        edge.index.apply(message, 0.0)
    drain(edge)
    edge.journal.stored(Tier.DEVICE, list(range(1, 400)), None)
    edge.deliver()
    drain(edge)
    trust = edge.trust()
    assert (trust.state, trust.reason) == (TrustState.DEGRADED, "limit on indexed blocks reached")
    assert edge.index.refused_messages == 1
    assert edge.index.trust(other, 0.0).reason == "no report confirms it"
    assert edge.index.take_wanted_checkpoints(10.0) == []
    edge.index.drop_rank(other)
    while edge.index.sweep(64):
        pass
    assert [rank for rank, _ in edge.index.take_wanted_checkpoints(10.0)] == [RANK]
    edge.journal.require_checkpoint()
    edge.deliver()
    drain(edge)
    assert edge.trust().state is TrustState.EXACT

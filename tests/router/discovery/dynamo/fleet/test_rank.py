from random import Random

import pytest
from msgspec.structs import replace

from router.discovery.dynamo.fleet.messages import (
    CacheEvent,
    Change,
    EventMessage,
    RemovedBlocks,
    RouterEvent,
    StoredBlock,
    StoredBlocks,
)
from router.discovery.dynamo.fleet.rank import LIMITS, DynamoRank
from router.protocol.values import SCHEME, Doubt, Identity, Rank, Tier
from router.sequence.hashing.block_hashes import chain, chain_hash
from support.fleets.dynamo_bus import VECTORS, message_of

IDENTITY = Identity(SCHEME, 16)
TIER_NAMES = {"device": Tier.DEVICE, "host_pinned": Tier.HOST, "disk": Tier.DISK}


class Told:
    """A rank that gets events, numbered as Dynamo 1.6.1 numbers them."""

    def __init__(self, first_event_id=1, **limits):
        limits = replace(LIMITS, **limits)
        self.rank = DynamoRank(Rank(7, 0), 100, IDENTITY, multiplier=3, limits=limits)
        self.first = self.next_id = first_event_id
        self.publisher = 5
        self.now_s = 0.0

    def event(self, data, tier="device", **fields):
        event = CacheEvent(self.next_id, data, 0)
        self.next_id += 1
        return RouterEvent(7, event, tier, **fields)

    def tell(self, event, **fields):
        message = EventMessage([event], [], self.first, self.publisher, **fields)
        refusal = self.rank.take(event, message, self.now_s)
        self.rank.check_invariants()
        return refusal

    def store(self, blocks, parent=None, tier="device", **fields):
        stored = StoredBlocks([StoredBlock(*each) for each in blocks], parent)
        return self.tell(self.event(Change(stored=stored), tier, **fields))

    def remove(self, hashes, tier="device"):
        return self.tell(self.event(Change(removed=RemovedBlocks(list(hashes))), tier))

    def clear(self, tier="device"):
        return self.tell(self.event("cleared", tier))

    def held(self, tier=Tier.DEVICE):
        return set(self.rank.journal.held(tier).tolist())

    @property
    def doubts(self):
        return Doubt(self.rank.journal.doubts)

    @property
    def counts(self):
        return self.rank.counts


def names(*local_hashes):
    return chain(list(local_hashes)).tolist()


@pytest.fixture
def told():
    told = Told()
    told.store([(1, 10), (2, 20), (3, 30)])
    return told


def test_blocks_are_named_by_their_tokens_and_those_before(told):
    assert told.held() == set(names(10, 20, 30))
    told.store([(4, 40)], parent=3)
    assert told.held() == set(names(10, 20, 30, 40))
    assert told.doubts == 0


def test_the_same_content_elsewhere_has_another_name(told):
    told.store([(9, 20)])
    assert told.held() == {*names(10, 20, 30), 20}


def test_a_removed_block_is_gone_and_its_children_keep_their_names(told):
    told.remove([2])
    kept = names(10, 20, 30)
    assert told.held() == {kept[0], kept[2]}
    told.store([(2, 20)], parent=1)
    assert told.held() == set(kept)


def test_storing_twice_and_removing_once_leaves_no_ghost(told):
    told.store([(3, 30)], parent=2)
    told.remove([3])
    assert told.held() == set(names(10, 20))


def test_of_1_0_2_every_copy_is_published_and_the_last_removal_counts():
    told = Told(first_event_id=0)
    for _ in range(3):
        told.store([(1, 10), (2, 20)])
    told.remove([2, 1])
    told.remove([2])
    assert told.held() == set(names(10, 20))
    told.remove([2])
    assert told.held() == {10}
    told.remove([2])
    assert told.counts.unknown_removed_blocks == 1
    told.clear()
    told.store([(1, 10)])
    told.remove([1])
    assert (told.held(), told.doubts) == (set(), 0)


def test_copies_of_a_hash_used_again_are_forgotten_with_it():
    told = Told(first_event_id=0)
    told.store([(1, 10)])
    told.store([(1, 10)])
    told.store([(1, 99)])
    told.remove([1])
    assert told.held() == set()


def test_two_engine_hashes_of_one_block_count_as_two(told):
    told.store([(13, 30)], parent=2)
    told.remove([3])
    assert told.held() == set(names(10, 20, 30))
    told.remove([13])
    assert told.held() == set(names(10, 20))


def test_removing_what_is_not_held_is_harmless(told):
    told.remove([77, 78])
    told.remove([1], tier="disk")
    assert told.held() == set(names(10, 20, 30))
    assert told.counts.unknown_removed_blocks == 3
    assert told.doubts == 0


def test_tiers_are_held_apart(told):
    told.store([(1, 10), (2, 20)], tier="host_pinned")
    told.remove([1, 2, 3])
    assert told.held() == set()
    assert told.held(Tier.HOST) == set(names(10, 20))
    told.store([(3, 30)], parent=2, tier="disk")
    assert told.held(Tier.DISK) == {names(10, 20, 30)[2]}


@pytest.mark.parametrize("fields", [{"tier": "tape"}, {"residency_domain": "cache_owner"}])
def test_events_without_credit_only_advance_the_id(told, fields):
    told.store([(8, 80)], **fields)
    told.remove([3])
    assert told.held() == set(names(10, 20))
    assert (told.counts.passed_over_events, told.doubts) == (1, 0)


def test_a_child_that_comes_before_its_parent_is_named_when_it_has_come():
    told = Told()
    told.store([(3, 30), (4, 40)], parent=2)
    told.store([(5, 50)], parent=4, tier="host_pinned")
    assert (told.held(), told.doubts) == (set(), 0)
    told.now_s = 1.9
    told.store([(1, 10), (2, 20)])
    assert told.held() == set(names(10, 20, 30, 40))
    assert told.held(Tier.HOST) == {names(10, 20, 30, 40, 50)[4]}
    assert (told.counts.orphaned_blocks, told.counts.adopted_blocks) == (3, 3)


def test_an_orphan_that_waits_too_long_is_doubted_until_it_is_named_or_gone():
    told = Told()
    told.store([(3, 30)], parent=2)
    told.now_s = 2.0
    told.rank.tick(told.now_s)
    assert told.doubts == Doubt.ORPHANS
    told.store([(1, 10), (2, 20)])
    assert (told.held(), told.doubts) == (set(names(10, 20, 30)), 0)
    told.store([(8, 80)], parent=7)
    told.now_s = 9.0
    told.remove([8])
    assert told.doubts == 0
    assert told.counts.unknown_removed_blocks == 0


def test_an_orphan_that_went_passes_its_name_on_to_its_children():
    told = Told()
    told.store([(3, 30), (4, 40)], parent=2)
    told.remove([3])
    told.store([(1, 10), (2, 20)])
    named = names(10, 20, 30, 40)
    assert told.held() == {named[0], named[1], named[3]}
    told.store([(5, 50)], parent=3)
    assert chain_hash(named[2], 50) in told.held()


def test_orphans_are_bounded_and_those_given_up_are_doubted():
    told = Told(held_back_blocks=2)
    told.store([(3, 30)], parent=2)
    told.store([(5, 50), (6, 60)], parent=4)
    assert told.counts.given_up_blocks == 1
    assert told.doubts == Doubt.ORPHANS
    told.clear()
    assert told.doubts == 0


def test_an_engine_hash_used_again_for_another_block_is_that_block(told):
    told.store([(3, 99)])
    assert told.held() == {*names(10, 20), 99}
    told.remove([3])
    assert told.held() == set(names(10, 20))


def test_names_of_removed_blocks_are_kept_for_a_while():
    told = Told(known_blocks=3)
    told.store([(1, 10)])
    told.store([(2, 20)])
    told.remove([1, 2])
    told.store([(3, 30)], parent=2)
    assert told.held() == {names(20, 30)[1]}
    told.store([(4, 40)])
    told.remove([4])
    told.store([(9, 90)], parent=1)
    assert told.held() == {names(20, 30)[1]}
    assert told.counts.orphaned_blocks == 1


def test_clearing_empties_a_tier(told):
    told.store([(1, 10)], tier="host_pinned")
    told.clear()
    assert told.held() == set()
    assert told.held(Tier.HOST) == {10}
    assert told.doubts == Doubt.LOWER_TIERS
    told.remove([1], tier="host_pinned")
    assert told.doubts == 0


@pytest.mark.parametrize("blocks", [[(1, 10), (2, 20), (1, 10)], [(5, 50), (9, 90)]])
def test_a_hash_twice_in_one_event_is_refused_and_doubted(blocks):
    told = Told()
    refusal = told.store(blocks, parent=9)
    assert "twice" in refusal
    assert told.doubts == Doubt.UNREADABLE
    assert told.counts.refused_events == 1
    assert told.store([(1, 10)]) is None
    assert told.held() == {10}


def test_more_blocks_than_the_limit_are_refused():
    told = Told(known_blocks=2)
    told.store([(1, 10), (2, 20)])
    assert "limit on known blocks" in told.store([(3, 30)], parent=2)
    assert told.held() == set(names(10, 20))


# ── Order ────────────────────────────────────────────────────────────────────────────────────────


def test_a_skipped_event_is_doubted_until_the_cache_is_cleared(told):
    told.next_id += 1
    told.store([(4, 40)], parent=3)
    assert told.held() == set(names(10, 20, 30, 40))
    assert (told.doubts, told.counts.gaps) == (Doubt.EVENTS_LOST, 1)
    told.clear()
    assert told.doubts == 0


def test_an_event_twice_in_a_row_is_applied_once(told):
    event = told.event(Change(removed=RemovedBlocks([3])))
    told.tell(event)
    told.tell(event)
    assert (told.counts.duplicate_events, told.counts.lives) == (1, 1)
    assert told.held() == set(names(10, 20))


def test_ids_that_go_back_are_a_new_life(told):
    told.next_id = told.first
    told.store([(1, 77)])
    assert told.held() == {77}
    assert (told.rank.journal.incarnation, told.counts.lives) == (101, 2)
    assert told.doubts == 0


def test_a_new_publisher_is_a_new_life_even_where_ids_go_on(told):
    told.publisher = 6
    told.store([(4, 40)], parent=3)
    assert told.held() == set()
    assert told.doubts == Doubt.EVENTS_LOST
    assert told.counts.lives == 2


def test_ids_that_go_back_to_the_middle_of_a_life_miss_its_beginning(told):
    told.next_id = 10
    told.remove([1])
    told.next_id = 5
    told.store([(1, 10)])
    assert (told.held(), told.doubts) == ({10}, Doubt.EVENTS_LOST)


@pytest.mark.parametrize(("first", "heard", "doubts"), [(0, 0, 0), (1, 1, 0), (0, 1, 4), (1, 9, 4)])
def test_late_join_doubts_earlier_events(first, heard, doubts):
    told = Told(first_event_id=first)
    told.next_id = heard
    told.store([(1, 10)])
    assert (told.held(), told.doubts) == ({10}, doubts)


def test_a_skipped_envelope_is_doubted():
    told = Told()
    stored = Change(stored=StoredBlocks([StoredBlock(1, 10)]))
    for sequence, event_data in enumerate((stored, stored, "cleared")):
        told.tell(told.event(event_data), sequence=sequence)
    assert told.doubts == 0
    told.tell(told.event(stored), sequence=4)
    assert told.doubts == Doubt.EVENTS_LOST


def test_a_snapshot_is_gone_on_from_and_never_vouched_for():
    told = Told(first_event_id=0)
    stored = Change(stored=StoredBlocks([StoredBlock(1, 10), StoredBlock(2, 20)]))
    told.rank.restore(RouterEvent(7, CacheEvent(0, stored)), 0.0)
    assert (told.held(), told.doubts) == (set(names(10, 20)), Doubt.EVENTS_LOST)
    told.next_id = 40
    told.store([(3, 30)], parent=2)
    assert told.held() == set(names(10, 20, 30))
    assert (told.counts.lives, told.doubts) == (1, Doubt.EVENTS_LOST)


def test_a_history_from_its_first_event_on_makes_a_snapshot_pointless():
    told = Told(first_event_id=0)
    told.rank.restore(
        RouterEvent(7, CacheEvent(0, Change(stored=StoredBlocks([StoredBlock(1, 10)])))), 0
    )
    told.store([(5, 50)])
    assert (told.held(), told.doubts) == ({50}, 0)


# ── Everything together ──────────────────────────────────────────────────────────────────────────


def test_captured_events_come_out_as_their_engines_held_them():
    """Three blocks, a child, another prompt; then the child was evicted."""
    ranks = {}
    for row in VECTORS:
        if not row["subject"].endswith("kv-events"):
            continue
        message = message_of(row)
        for event in message.events:
            rank = ranks.setdefault(event.rank, DynamoRank(event.rank, 1, IDENTITY, multiplier=3))
            assert rank.take(event, message, 0.0) is None
    assert len(ranks) == 3
    first = [15310707395893867146, 15292316782987903195, 5532946206955930018]
    second = [5965835322040480042, 4306606996294919613]
    for rank in ranks.values():
        held = set(rank.journal.held(Tier.DEVICE).tolist())
        assert held == {*names(*first), *names(*second)}
        assert (rank.journal.doubts, rank.counts.gaps, rank.counts.lives) == (0, 0, 1)


class Engine:
    """The truth: what an engine holds, and what its publisher says of it, dedup included."""

    def __init__(self, rng):
        self.rng = rng
        self.parents = {}
        self.locals = {}
        self.held = {tier: set() for tier in TIER_NAMES}

    def path(self, block):
        parent = self.parents[block]
        return [*(self.path(parent) if parent else ()), self.locals[block]]

    def name(self, block):
        return names(*self.path(block))[-1]

    def change(self):
        tier = self.rng.choice(list(TIER_NAMES))
        roll = self.rng.random()
        if roll < 0.02:
            self.held[tier].clear()
            return tier, "cleared"
        if roll < 0.4 and self.held[tier]:
            blocks = self.rng.sample(sorted(self.held[tier]), min(3, len(self.held[tier])))
            self.held[tier] -= set(blocks)
            return tier, Change(removed=RemovedBlocks(blocks))
        blocks, parent = self.pick()
        self.held[tier] |= set(blocks)
        stored = [StoredBlock(b, self.locals[b]) for b in blocks]
        return tier, Change(stored=StoredBlocks(stored, parent))

    def pick(self):
        """Consecutive blocks: new ones, or such as were there before."""
        if self.parents and self.rng.random() < 0.4:
            block = self.rng.choice(sorted(self.parents))
            return [block], self.parents[block]
        parent = self.rng.choice([None, *sorted(self.parents)])
        blocks, before = [], parent
        for _ in range(self.rng.randint(1, 4)):
            block = len(self.parents) + 1
            self.parents[block], self.locals[block] = before, self.rng.randint(1, 9)
            blocks.append(block)
            before = block
        return blocks, parent


@pytest.mark.parametrize("seed", range(12))
def test_whatever_an_engine_does_is_what_the_journal_holds(seed):
    engine, told = Engine(Random(seed)), Told()
    for _ in range(150):
        tier, data = engine.change()
        told.tell(told.event(data, tier))
        for name, tier in TIER_NAMES.items():
            assert told.held(tier) == {engine.name(block) for block in engine.held[name]}
    assert told.counts.orphaned_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_parents_that_come_later_name_all_that_waited(seed):
    """Stores in any order, without removals: in the end everything is held, and nothing doubted."""
    rng = Random(seed)
    engine, told = Engine(rng), Told()
    changes = []
    for _ in range(40):
        blocks, parent = engine.pick()
        tier = rng.choice(list(TIER_NAMES))
        engine.held[tier] |= set(blocks)
        stored = [StoredBlock(b, engine.locals[b]) for b in blocks]
        changes.append((tier, Change(stored=StoredBlocks(stored, parent))))
    rng.shuffle(changes)
    for tier, data in changes:
        told.tell(told.event(data, tier))
    for name, tier in TIER_NAMES.items():
        assert told.held(tier) == {engine.name(block) for block in engine.held[name]}
    told.rank.tick(100.0)
    assert told.doubts == 0
    told.rank.journal.take()


def test_every_message_of_the_journal_counts_what_is_held():
    engine, told = Engine(Random(5)), Told()
    for _ in range(60):
        tier, data = engine.change()
        told.tell(told.event(data, tier))
        for message in told.rank.journal.take():
            assert message.state.counts == tuple(len(told.held(t)) for t in Tier)

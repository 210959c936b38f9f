"""An engine and a block manager publish one rank: its log has what either holds in each tier."""

from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from oracle.engine import Block
from router.protocol.events import Checkpoint, Cleared, Stored
from router.protocol.values import Doubt, Rank, Tier, unpack_hashes
from router.publisher.feed.tier_feed import TierFeed
from router.publisher.feed.tier_wire import LENGTH, VERSION, Hello, TierEvents, decode, encode
from router.publisher.journal.consolidator import JournalConsolidator
from router.publisher.journal.held_blocks import path_heads
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.runtime.kernels.hash_key import derive
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying
from support.chaos.fuzzing import examples
from support.engines.engines import CLEARED, IDENTITY, batch, removed, stored
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared
from worker_agent.blocks.names import BlockName
from worker_agent.connector.slots.tier_inventory import TierInventory

SEEDS = st.integers(0, 2**32 - 1)
RANK = Rank(7, 0)
MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "REMOTE"}
KEYED = HashKeying(derive(b"a secret of the fleet"))
NOTHING = {tier: set() for tier in Tier}


def over_the_wire(message):
    return decode(encode(message)[LENGTH.size :])


class Manager:
    """A block manager: what each tier holds, by identity, and the news of it."""

    def __init__(self):
        self.inventory = TierInventory()
        self.held = {tier: {} for tier in Tier}

    def change(self, tier, change):
        match change:
            case BlockStored(name):
                self.held[tier][name.identity] = name
            case BlockRemoved(name):
                del self.held[tier][name.identity]
            case _:
                self.held[tier].clear()
        return tier, change

    def hashes(self, tier):
        return {name.sequence_hash for name in self.held[tier].values()}


class LogReader:
    """A router that reads the log, and believes nothing else."""

    def __init__(self):
        self.incarnation = self.event_id = 0
        self.held = {}

    def read(self, messages):
        for message in messages:
            if isinstance(message, Checkpoint):
                self.read_checkpoint(message)
            else:
                assert message.incarnation == self.incarnation
                assert message.first_event_id == self.event_id + 1
                self.event_id = message.last_event_id
                for event in message.events:
                    self.apply(event)

    def read_checkpoint(self, checkpoint):
        assert checkpoint.incarnation >= self.incarnation
        self.incarnation, self.event_id = checkpoint.incarnation, checkpoint.event_id
        self.held = {tier: set() for tier in Tier}
        for blocks in checkpoint.blocks:
            self.held[blocks.tier].update(unpack_hashes(blocks.sequence_hashes).tolist())

    def apply(self, event):
        if isinstance(event, Cleared):
            for tier in Tier if event.tier is None else (event.tier,):
                self.held[tier].clear()
        else:
            held, hashes = self.held[event.tier], unpack_hashes(event.sequence_hashes).tolist()
            change = held.update if isinstance(event, Stored) else held.difference_update
            change(hashes)


class ConsolidatedMachine(RuleBasedStateMachine):
    """Random changes of either, in any order, with restarts of both."""

    def __init__(self):
        super().__init__()
        random = Random(5)
        self.blocks = []
        for number in range(24):
            parent = random.choice([None, *self.blocks[-4:]])
            tokens = [random.randrange(9) for _ in range(IDENTITY.block_size)]
            self.blocks.append(Block(1000 + number, tokens, parent, None, None))
        self.copies = {tier: {} for tier in Tier}
        self.naming = PLAIN
        self.now_s = 0.0
        self.reader = LogReader()
        self.lives = 1
        self.manager = Manager()
        self.told = NOTHING
        self.begin_agent()

    def begin_agent(self, saved=None):
        """A process of its own; what it knew of the engine may be kept, what of the manager not."""
        journal = EventJournal(RANK, self.lives, IDENTITY, naming=self.naming)
        self.all = JournalConsolidator(journal)
        self.normalizer = Normalizer(self.all.source(), IDENTITY)
        self.feed = TierFeed(self.all.source(), 0)
        if saved is not None:
            self.normalizer.load(saved, self.now_s)
        self.is_connected, self.told = False, NOTHING

    # ── The engine ───────────────────────────────────────────────────────────────────────────────

    @rule(seed=SEEDS, tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK]))
    def engine_stores(self, seed, tier):
        block = Random(seed).choice(self.blocks)
        path = [block]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        hashes = [each.engine_hash for each in path]
        tokens = [token for each in path for token in each.tokens]
        self.normalizer.apply(batch(stored(hashes, tokens, medium=MEDIUMS[tier])), self.now_s)
        for each in path:
            self.copies[tier][each] = self.copies[tier].get(each, 0) + 1

    @rule(seed=SEEDS, tier=st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.DISK]))
    def engine_removes(self, seed, tier):
        for block in Random(seed).sample(self.blocks, 6):
            self.normalizer.apply(batch(removed([block.engine_hash], MEDIUMS[tier])), self.now_s)
            self.copies[tier][block] = max(self.copies[tier].get(block, 0) - 1, 0)

    @rule()
    def engine_clears(self):
        lower = any(sum(self.copies[tier].values()) for tier in Tier if tier)
        self.normalizer.apply(batch(CLEARED), self.now_s)
        self.copies[Tier.DEVICE].clear()
        assert bool(self.normalizer.journal.state.doubts & Doubt.LOWER_TIERS) == lower

    @rule()
    def engine_begins_a_new_life(self):
        """As `EngineFeed` does it."""
        self.lives += 1
        self.normalizer.journal.new_life(self.lives)
        self.normalizer.reset()
        self.copies = {tier: {} for tier in Tier}

    # ── The manager ──────────────────────────────────────────────────────────────────────────────

    def tell(self, changes):
        events = self.manager.inventory.apply(changes)
        if self.is_connected and events:
            self.feed.take(over_the_wire(TierEvents(events, is_all=False)))
        self.note_published()

    def note_published(self):
        if self.is_connected:
            self.told = {tier: self.manager.hashes(tier) for tier in Tier}

    @rule(seed=SEEDS)
    def manager_changes(self, seed):
        """Now and then two blocks share a public hash."""
        random, changes = Random(seed), []
        for _ in range(random.randint(1, 12)):
            tier, block = random.choice(list(Tier)), random.choice(self.blocks)
            identity = bytes([random.randrange(2)]) + block.name.to_bytes(15, "little")
            parent = block.parent and block.parent.name
            name = BlockName(identity, block.name, None, parent)
            if random.random() < 0.03:
                changes.append(self.manager.change(tier, CacheCleared()))
            else:
                is_held = identity in self.manager.held[tier]
                change = BlockRemoved(name) if is_held else BlockStored(name)
                changes.append(self.manager.change(tier, change))
        self.tell(changes)

    @rule()
    def connection_breaks(self):
        self.is_connected = False
        self.feed.begin()

    @rule()
    def connection_is_made(self):
        self.feed.begin()
        self.feed.take(over_the_wire(Hello(VERSION, IDENTITY, 0)))
        for part in self.manager.inventory.held():
            self.feed.take(over_the_wire(part))
        assert self.feed.take(over_the_wire(TierEvents([], is_all=True)))
        self.is_connected = True
        self.note_published()

    @rule(is_kept=st.booleans())
    def manager_restarts(self, is_kept):
        """Its next life adopts what its disk kept, or nothing."""
        kept = self.manager.held[Tier.DISK] if is_kept else {}
        self.manager = Manager()
        self.is_connected = False
        self.feed.begin()
        self.tell([self.manager.change(Tier.DISK, BlockStored(name)) for name in kept.values()])

    @rule(keeps_state=st.booleans(), is_keyed=st.booleans())
    def agent_restarts(self, keeps_state, is_keyed):
        saved = b"".join(self.normalizer.save()) if keeps_state else None
        self.lives += 1
        self.naming = KEYED if is_keyed else PLAIN
        self.begin_agent(saved)
        if not keeps_state:
            self.copies = {tier: {} for tier in Tier}

    @rule()
    def router_reads(self):
        """A doubt alone is no message: reports of load carry it."""
        self.reader.read(self.all.journal.take())
        assert self.reader.held == self.expected()
        taken = replace(self.all.journal.taken_state, doubts=self.all.journal.doubts)
        assert taken == self.all.journal.state

    # ── What holds ───────────────────────────────────────────────────────────────────────────────

    def engine_holds(self, tier):
        return {block.name for block, copies in self.copies[tier].items() if copies}

    def expected(self):
        name = self.naming.name
        return {tier: {name(h) for h in self.engine_holds(tier) | self.told[tier]} for tier in Tier}

    @invariant()
    def holds_what_either_holds(self):
        self.all.check_invariants()
        self.normalizer.check_invariants()
        held = {tier: set(self.all.journal.held(tier).tolist()) for tier in Tier}
        assert held == self.expected()
        self.all.journal.check_invariants()


TestConsolidated = ConsolidatedMachine.TestCase
TestConsolidated.settings = settings(max_examples=examples(16), stateful_step_count=40)


def test_tier_of_two_sources_is_published_once():
    journal = EventJournal(RANK, 1, IDENTITY)
    everything = JournalConsolidator(journal)
    engine, manager = everything.source(), everything.source()
    journal.take()
    hashes, heads = np.array([1, 2], np.uint64), path_heads([2], [None])
    for source in (engine, manager):
        source.stored_paths(Tier.HOST, hashes, heads)
    [told] = journal.take()
    assert [(type(event), event.block_count) for event in told.events] == [(Stored, 2)]
    engine.cleared()
    assert not journal.has_news
    manager.removed(Tier.HOST, hashes[1:])
    manager.cleared(Tier.HOST)
    [told] = journal.take()
    assert [event.tier for event in told.events if isinstance(event, Cleared)] == [Tier.HOST]
    assert journal.state.counts == (0, 0, 0, 0)


def test_no_two_tables_spread_keys_alike():
    """One that is filled in the order of another would be searched from end to end."""
    everything = JournalConsolidator(EventJournal(RANK, 1, IDENTITY, multiplier=7), 7)
    sources = [everything.source(), everything.source()]
    multipliers = {7, *(source._held._multiplier for source in sources)}
    assert len(multipliers) == 3
    assert all(multiplier % 2 and multiplier < 2**64 for multiplier in multipliers)


def test_holes_are_of_all_sources_together():
    """A prefix is whole if one has its beginning and the other the rest."""
    journal = EventJournal(RANK, 1, IDENTITY)
    everything = JournalConsolidator(journal)
    engine, manager = everything.source(), everything.source()
    manager.stored_paths(Tier.HOST, np.array([2], np.uint64), path_heads([1], [1]))
    assert journal.state.holes == (0, 1, 1, 1)
    engine.stored_paths(Tier.DEVICE, np.array([1], np.uint64), path_heads([1], [None]))
    assert journal.state.holes == (0, 0, 0, 0)


def test_doubt_of_one_source_is_the_ranks_doubt():
    journal = EventJournal(RANK, 1, IDENTITY)
    everything = JournalConsolidator(journal)
    engine, manager = everything.source(), everything.source()
    engine.set_doubts(4)
    manager.set_doubts(16)
    assert journal.doubts == 20
    engine.set_doubts(0)
    assert (journal.doubts, engine.state.doubts) == (16, 0)

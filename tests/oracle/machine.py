"""Any index against its definition: mixed operations, everything compared after every one.

A rule draws one number and lets `Random` choose ranks, tiers and blocks with it. That costs
hypothesis a tenth of a millisecond per operation, so that sequences of 500 are affordable, and
hypothesis still chooses, weighs and shrinks the operations. What is asked after an operation comes
from a generator of the sequence.
"""

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oracle.index import ExactIndex
from router.indexer.base import DIFFERENT, DONE, REFUSED
from router.indexer.radix_tree.radix_tree import MULTIPLIER
from router.protocol.events import Cleared, EventBatch, Removed, Stored, pack_batch
from router.protocol.values import SCHEME, U64_MAX, Identity, Rank, Tier, pack_hashes
from router.publisher.journal.held_blocks import HeldBlocks
from support.chaos.fuzzing import examples

RANKS = [Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(2, 0), Rank(3, 0)]
TREE_BLOCKS = 28
CHAIN_BLOCKS = 300
STEPS = 500
TIERS = tuple(Tier)
SEEDS = st.integers(0, 2**32 - 1)

IDENTITY = Identity(SCHEME, 16)

_INVERSE = pow(MULTIPLIER, -1, 2**64)


def hash_array(hashes):
    return np.array(hashes, dtype=np.uint64)


def key_spread_to(spread):
    """The key that is this number once it is multiplied: it says where the key's slot is."""
    return spread * _INVERSE & U64_MAX


def sequence_settings(sequences):
    return settings(
        max_examples=examples(sequences),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Universe:
    """A forest of blocks, and two long chains in it; many keys crowd around the ends of rings."""

    def __init__(self, random):
        self.chain_share = random.choice([0, 0.005, 0.01, 0.05])
        self.paths = []
        for block in dict.fromkeys([0, U64_MAX, *(_key(random) for _ in range(TREE_BLOCKS))]):
            recent = self.paths[-1:] * 8 + self.paths[-6:]
            parent = random.choice([[], *recent])
            self.paths.append([*parent, block])
        self.chains = []
        for _ in range(2):
            chain = [random.getrandbits(64) for _ in range(CHAIN_BLOCKS)]
            self.chains.append([*random.choice(self.paths), *chain])
        known = [*self.paths, *self.chains]
        self.parent_of = {path[i]: path[i - 1] for path in known for i in range(1, len(path))}

    def path(self, random):
        """From a root to anywhere."""
        if random.random() < self.chain_share:
            return random.choice(self.chains)
        return random.choice(self.paths)

    def blocks(self, random, count):
        """Blocks from anywhere, in any order, some of them twice."""
        return [random.choice(random.choice(self.paths)) for _ in range(count)]

    def below(self, top):
        """A block and all that come after it."""
        chains = self.chains if self.chain_share else ()
        chained = (block for c in chains if top in c for block in c[c.index(top) :])
        return list(dict.fromkeys([*(p[-1] for p in self.paths if top in p), *chained]))


def _key(random):
    if random.random() < 0.5:
        return random.getrandbits(64)
    return key_spread_to((random.randrange(4) << 62) + random.randrange(-12, 12))


class IndexMachine(RuleBasedStateMachine):
    """Subclasses say how to `make` an index, and which radix `trees` it consists of.

    Of several trees a random one has its invariants checked after an operation. `tidiness`: how
    many changes leave no holes, so that searches jump. Half of them are for the path just touched.
    """

    def make(self, random):
        raise NotImplementedError

    def trees(self):
        raise NotImplementedError

    @initialize(seed=SEEDS)
    def begin(self, seed):
        self.random = Random(seed)
        self.universe = Universe(self.random)
        self.tidiness = self.random.choice([0.0, 0.6, 0.95])
        self.touched = self.universe.paths[-1]
        self.index, self.oracle = self.make(self.random), ExactIndex()
        self.held = {rank: HeldBlocks() for rank in RANKS}
        self.staged = {rank: HeldBlocks() for rank in RANKS}
        self.summaries = {rank: self.oracle.summary(rank) for rank in RANKS}

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()

    def both(self, method, rank, *arguments):
        for index in (self.index, self.oracle):
            assert getattr(index, method)(rank, *arguments) in (True, None)
        self.summaries[rank] = self.oracle.summary(rank)

    def hold(self, random, held, method, blocks):
        """Store or stage blocks of one path, or of any, and follow it as the rank itself would."""
        rank, tier = random.choice(RANKS), random.choice(TIERS)
        self.both(method, rank, tier, hash_array(blocks))
        parent_of = self.universe.parent_of
        if all(parent_of.get(b) == a for a, b in pairwise(blocks)):
            held[rank].store(tier, blocks, parent_of.get(blocks[0]))
        else:
            for block in blocks:
                held[rank].store(tier, [block], parent_of.get(block))
        self.may_note_holes(random, rank)

    def may_note_holes(self, random, rank):
        if random.random() < 0.8:
            self.index.note_holes(rank, self.held[rank].state().holes)

    def path(self, random):
        self.touched = self.universe.path(random)
        return self.touched

    def start(self, random, path):
        return 0 if random.random() < self.tidiness else random.randrange(len(path))

    def end(self, random, path):
        """From somewhere on: what a rank gives up of a path, and maybe all that is below."""
        tail = path[random.randrange(len(path)) :]
        return self.universe.below(tail[0]) if random.random() < self.tidiness else tail

    @rule(seed=SEEDS)
    def store_prefix(self, seed):
        random = Random(seed)
        path = self.path(random)
        self.hold(random, self.held, "store", path[: random.randint(1, len(path))])

    @rule(seed=SEEDS)
    def store_path(self, seed):
        random = Random(seed)
        self.hold(random, self.held, "store", self.path(random))

    @rule(seed=SEEDS)
    def store_segment(self, seed):
        random = Random(seed)
        path = self.path(random)
        self.hold(random, self.held, "store", path[self.start(random, path) :])

    @rule(seed=SEEDS)
    def store_any(self, seed):
        random = Random(seed)
        blocks = self.universe.blocks(random, random.randint(1, 5))
        if random.random() < self.tidiness:
            blocks = self.path(random)
        self.hold(random, self.held, "store", blocks * random.randint(1, 2))

    @rule(seed=SEEDS)
    def stage(self, seed):
        random = Random(seed)
        path = self.path(random)
        self.hold(random, self.staged, "stage", path[self.start(random, path) :])

    @rule(seed=SEEDS)
    def end_staging(self, seed):
        """Commit what was staged, or drop it; sometimes there is nothing."""
        random = Random(seed)
        rank = random.choice([*RANKS, *(r for r in RANKS * 5 if self.staged[r].block_count)])
        staged, self.staged[rank] = self.staged[rank], HeldBlocks()
        if random.random() < 0.7:
            self.both("commit_staged", rank)
            self.held[rank] = staged
            self.may_note_holes(random, rank)
        else:
            self.both("drop_staged", rank)

    def give_up(self, random, blocks):
        rank, tier = random.choice(RANKS), random.choice(TIERS)
        self.both("remove", rank, tier, hash_array(blocks))
        self.held[rank].remove(tier, blocks)
        self.may_note_holes(random, rank)

    @rule(seed=SEEDS)
    def remove_tail(self, seed):
        random = Random(seed)
        self.give_up(random, self.end(random, self.path(random)))

    @rule(seed=SEEDS)
    def remove_any(self, seed):
        random = Random(seed)
        blocks = self.universe.blocks(random, random.randint(1, 8))
        if random.random() < self.tidiness:
            blocks = self.end(random, self.path(random))
        self.give_up(random, [*blocks, random.getrandbits(64)])

    @rule(seed=SEEDS)
    def apply(self, seed):
        """A batch as a rank publishes it, of changes that are in it as they were made."""
        random = Random(seed)
        rank = random.choice(RANKS)
        events = [self.change(random, self.held[rank]) for _ in range(random.randint(1, 5))]
        packed = pack_batch(self.held[rank].state(), events)
        batch = EventBatch(rank.worker_id, rank.dp_rank, 1, IDENTITY, 1, len(events), packed)
        assert self.oracle.apply(rank, batch, 0, 1) == DONE
        progress, room = 0, random.choice([1, 3, 10, 10**6])
        while progress != DONE:
            progress = self.index.apply(rank, batch, progress, room)
            assert progress not in (REFUSED, DIFFERENT)
        self.summaries[rank] = self.oracle.summary(rank)

    def change(self, random, held):
        """Something happens to what a rank holds; returns the event that says so."""
        tier, path = random.choice(TIERS), self.path(random)
        kind = random.choices([Stored, Removed, Cleared], [8, 4, 1])[0]
        if kind is Stored:
            blocks = path[: random.randint(0, len(path))]
            held.store(tier, blocks, None)
            return Stored(tier, pack_hashes(hash_array(blocks)))
        if kind is Removed:
            blocks = self.end(random, path)
            held.remove(tier, blocks)
            return Removed(tier, pack_hashes(hash_array(blocks)))
        tier = random.choice([None, *TIERS, *TIERS])
        held.clear(tier)
        return Cleared(tier)

    @rule(seed=SEEDS)
    def clear_tier(self, seed):
        random = Random(seed)
        rank, tier = random.choice(RANKS), random.choice(TIERS)
        self.both("clear", rank, tier)
        self.held[rank].clear(tier)
        self.may_note_holes(random, rank)

    @rule(seed=SEEDS)
    def clear(self, seed):
        """All of a rank, and maybe what it has staged; or nothing, for ranks shall live."""
        random = Random(seed)
        rank, is_removed = random.choice(RANKS), random.random() < 0.5
        if is_removed and self.staged[rank].block_count:
            self.both("drop_staged", rank)
            self.staged[rank] = HeldBlocks()
        if is_removed:
            self.both("clear", rank)
            self.held[rank].clear()

    @rule(seed=SEEDS)
    def sweep(self, seed):
        self.index.sweep(Random(seed).randint(1, 3))

    @rule()
    def sweep_all(self):
        while self.index.sweep(2):
            pass
        assert self.index.stats().unswept_holders == 0

    @rule(seed=SEEDS)
    def expect(self, seed):
        self.index.expect(Random(seed).choice([0, 0, len(RANKS), 2, 1000, 10**9]))

    @rule(seed=SEEDS)
    def note_holes(self, seed):
        random = Random(seed)
        for rank in RANKS:
            self.may_note_holes(random, rank)
        if random.random() < 0.2:
            self.index.note_holes(random.choice(RANKS), None)

    @invariant()
    def answers_as_the_oracle(self):
        path = self.random.choice([self.touched, self.universe.path(self.random)])
        unknown = [self.random.getrandbits(64)] * self.random.randrange(2)
        prompt = hash_array([*path[self.random.choice([0, 0, 0, len(path) // 2]) :], *unknown])
        found = dict(self.index.find_matches(prompt).items())
        assert found == self.oracle.find_matches(prompt)

    @invariant()
    def sums_up_as_the_oracle(self):
        for rank, summary in self.summaries.items():
            assert self.index.summary(rank) == summary

    @invariant()
    def holds_what_the_oracle_holds(self):
        dumped = list(self.index.dump())
        held = {(each.rank, each.tier): set(each.sequence_hashes.tolist()) for each in dumped}
        assert held == {key: blocks for key, blocks in self.oracle.sets.items() if blocks}
        assert sum(map(len, held.values())) == sum(len(each.sequence_hashes) for each in dumped)
        assert len(held) == len(dumped)

    @invariant()
    def keeps_its_promises(self):
        self.random.choice(self.trees()).check_invariants()
        assert self.index.take_differing() == []
        assert self.index.stats().differing_answers == 0

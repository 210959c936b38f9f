"""Whatever an engine says, in whatever order: what is held is what an exact model holds."""

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oracle.engine import FULL_GROUPS, Block, EngineModel
from router.protocol.values import Doubt, Tier
from router.publisher.normalizer.settings import NormalizerLimits
from router.runtime.kernels.hash_key import derive
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying
from support.chaos.fuzzing import examples
from support.engines.engines import CLEARED, IDENTITY, Edge, batch, placeholder, removed, stored

SEEDS = st.integers(0, 2**32 - 1)
BLOCKS = 50
LIMITS = NormalizerLimits(held_back_blocks=6, contexts=40)
MEDIUMS = {Tier.DEVICE: None, Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "REMOTE"}
TIERS = [*[Tier.DEVICE] * 4, *Tier]
WINDOW = {"group": 1, "spec_kind": "sliding_window"}
KEYED = HashKeying(derive(b"a secret of the fleet"))
STRANGERS = [1, 2, 3]
"""Hashes that no block has."""


def grow_forest(random):
    blocks = []
    for _ in range(BLOCKS):
        parent = random.choice([None, *blocks[-12:], *blocks[-3:] * 4])
        if parent is None:
            lora_name, cache_salt = random.choice([None, None, "ad"]), random.choice([None, "s"])
        else:
            lora_name, cache_salt = parent.lora_name, parent.cache_salt
        tokens = [random.randrange(9) for _ in range(IDENTITY.block_size)]
        engine_hash = random.choice([random.getrandbits(64), 1000 + len(blocks)])
        blocks.append(Block(engine_hash, tokens, parent, lora_name, cache_salt))
    return blocks


def extra_keys(blocks):
    """As vLLM sends them: the LoRA with every block, the salt with the first of a prompt."""
    keys = [[block.lora_name] if block.lora_name else [] for block in blocks]
    if blocks[0].parent is None and blocks[0].cache_salt:
        keys[0].append(blocks[0].cache_salt)
    return [block_keys or None for block_keys in keys]


class NormalizerMachine(RuleBasedStateMachine):
    @initialize(seed=SEEDS)
    def begin(self, seed):
        self.random = Random(seed)
        self.blocks = grow_forest(self.random)
        self.salts_every_event = self.random.random() < 0.5
        self.edge = Edge(
            limits=LIMITS,
            naming=self.random.choice([PLAIN, KEYED]),
            report_mode=self.random.choice(["new", "new", "full"]),
            num_gpu_blocks=self.random.choice([None, 60]),
            clears_lower_tiers=self.random.random() < 0.3,
            has_lower_tiers=self.random.choice([None, False]),
        )
        self.model = EngineModel(
            held_back_blocks=LIMITS.held_back_blocks,
            held_back_s=LIMITS.held_back_s,
            settings=self.edge.settings,
        )

    def feed(self, *events):
        self.edge.normalizer.apply(batch(*events), self.edge.now_s)
        self.model.end_batch(self.edge.now_s)

    def path(self, random):
        """Consecutive blocks, mostly from a root on."""
        path = [random.choice(self.blocks)]
        while path[0].parent is not None and random.random() < 0.9:
            path.insert(0, path[0].parent)
        return path

    def some(self, random):
        return random.sample(self.blocks, random.randint(1, 8))

    @rule(seed=SEEDS)
    def store(self, seed):
        random = Random(seed)
        events = []
        for _ in range(random.randint(1, 3)):
            group, tier, blocks = (
                random.choice(FULL_GROUPS),
                random.choice(TIERS),
                self.path(random),
            )
            events.append(self.stored(group, tier, blocks))
            self.model.store(group, blocks, tier, self.edge.now_s)
        self.feed(*events)

    def stored(self, group, tier, blocks):
        first, parent = blocks[0], blocks[0].parent
        fields = {"lora_name": first.lora_name, "extra_keys": extra_keys(blocks)}
        if self.salts_every_event:
            fields = {"lora_name": first.lora_name, "cache_salt": first.cache_salt}
        return stored(
            [block.engine_hash for block in blocks],
            [token for block in blocks for token in block.tokens],
            parent and parent.engine_hash,
            medium=MEDIUMS[tier],
            group=group,
            spec_kind="full_attention" if group else None,
            **fields,
        )

    @rule(seed=SEEDS)
    def place(self, seed):
        random = Random(seed)
        group, tier, blocks = (
            random.choice(FULL_GROUPS),
            random.choice(TIERS[5:]),
            self.some(random),
        )
        blocks = random.choice([blocks, self.path(random)])
        kind = "full_attention" if group else None
        hashes = [block.engine_hash for block in blocks]
        event = placeholder(hashes, medium=MEDIUMS[tier], group=group, spec_kind=kind)
        self.model.place(group, blocks, tier)
        self.feed(event)

    @rule(seed=SEEDS, rounds=st.integers(1, 3))
    def remove(self, seed, rounds):
        random = Random(seed)
        events = []
        for _ in range(rounds):
            group, tier = random.choice(FULL_GROUPS), random.choice(TIERS)
            blocks = random.choice([self.some(random), self.path(random)])
            hashes = [block.engine_hash for block in blocks]
            random.shuffle(hashes)
            events.append(removed([*hashes, *STRANGERS], MEDIUMS[tier], group))
            self.model.remove(group, blocks, tier)
        self.feed(*events)

    @rule(seed=SEEDS)
    def remove_what_is_held(self, seed):
        random = Random(seed)
        tier = random.choice(TIERS)
        for group, block in [key for key, n in self.model.copies[tier].items() if n]:
            if random.random() < 0.5:
                self.model.remove(group, [block], tier)
                self.feed(removed([block.engine_hash], MEDIUMS[tier], group))

    @rule(seed=SEEDS)
    def speak_of_a_window(self, seed):
        random = Random(seed)
        if random.random() < 0.2:
            hashes = [block.engine_hash for block in self.some(random)]
            self.model.doubts |= Doubt.HYBRID
            self.feed(stored(hashes, [0] * 4 * len(hashes), **WINDOW), removed(hashes, group=1))

    @rule(seed=SEEDS)
    def have_an_unknown_field(self, seed):
        if Random(seed).random() < 0.2:
            self.model.doubts |= Doubt.UNKNOWN_FIELDS
            self.edge.normalizer.apply(batch(unknown_field="field 12"), self.edge.now_s)
            self.model.end_batch(self.edge.now_s)

    @rule(seed=SEEDS)
    def clear(self, seed):
        if Random(seed).random() < 0.3:
            self.model.clear()
            self.feed(CLEARED)

    @rule(passed_s=st.sampled_from([0.1, 1.0, 2.0]))
    def wait(self, passed_s):
        self.edge.now_s += passed_s
        self.feed()

    @rule(seed=SEEDS)
    def lose_everything(self, seed):
        random = Random(seed)
        if random.random() < 0.2:
            hybrid = self.model.doubts & Doubt.HYBRID
            self.model.begin()
            if random.random() < 0.5:
                self.edge.normalizer.reset()
            else:
                self.edge.normalizer.events_lost()
                self.model.doubts = Doubt.EVENTS_LOST | hybrid
                self.model.may_have_lower_tiers = self.edge.settings.has_lower_tiers is not False

    @rule()
    def restart(self):
        """Going on from what was saved equals going on."""
        saved = b"".join(self.edge.normalizer.save())
        naming = self.edge.journal.naming
        other = Edge(limits=LIMITS, settings=self.edge.settings, naming=naming)
        other.now_s = self.edge.now_s
        other.normalizer.load(saved, other.now_s)
        self.model.waiting = [
            (group, blocks, other.now_s + LIMITS.held_back_s)
            for group, blocks, _ in self.model.waiting
        ]
        assert other.normalizer.stats == self.edge.normalizer.stats
        assert other.journal.state == self.edge.journal.state
        self.edge = other

    @invariant()
    def agrees(self):
        if not hasattr(self, "edge"):
            return
        self.edge.normalizer.check_invariants()
        for tier in Tier:
            named = map(self.edge.journal.naming.name, self.model.held(tier))
            assert self.edge.held(tier) == set(named)
        assert self.edge.orphans == len(self.model.orphans())
        assert self.edge.doubts == self.model.received_doubts()
        waiting = sum(len(waiting[1]) for waiting in self.model.waiting)
        assert self.edge.normalizer.stats.waiting_blocks == waiting
        assert self.edge.counts.refused_events == 0


NormalizerMachine.TestCase.settings = settings(
    max_examples=examples(25),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestNormalizer = NormalizerMachine.TestCase

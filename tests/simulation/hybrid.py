"""Engines with hybrid models: windows, states and chunks beside full attention, one pool for all.

What such a rank holds is full attention's blocks, as pairs of tier and hash, and those of each
class, as pairs of the class and the hash; from both, and the layout, follows what it can resume.
"""

from msgspec import Struct
from msgspec.structs import replace

from oracle.hybrid import cached_tokens
from oracle.hybrid_engine import HybridEngine, Layers, class_of, random_groups
from router.protocol.hybrid import HybridSettings, Layout
from router.protocol.values import Doubt, Tier
from router.publisher.engine_events.batch import EngineStored
from simulation.corpus import BLOCK_SIZE

_HYBRID = int(Doubt.HYBRID)


class HybridModel(Struct, frozen=True):
    """The layers of a model, and the way that its engine caches them."""

    groups: tuple[Layers, ...]
    pool_blocks: int
    retention_tokens: int
    chunk_tokens: int

    def engine(self, life):
        """A new engine; `life` determines how it names blocks."""
        return HybridEngine(
            self.groups,
            pool_blocks=self.pool_blocks,
            retention_tokens=self.retention_tokens,
            chunk_tokens=self.chunk_tokens,
            seed=life,
        )

    @property
    def layout(self) -> Layout:
        """The layout that is published of it."""
        return self.engine(0).layout

    @property
    def settings(self) -> HybridSettings:
        """What is registered with it."""
        return self.engine(0).settings


def draw_model(random):
    """A random model, whose pool is too small for all prompts."""
    groups = random_groups(random, may_be_eagle=True)
    alignment = max(each.block_tokens for each in groups)
    return HybridModel(
        groups,
        pool_blocks=random.choice((20, 40, 80)) * len(groups),
        retention_tokens=random.choice((0, 0, alignment, 4 * alignment)),
        chunk_tokens=random.choice((8, 24, 1000)),
    )


class HybridCache:
    """One rank's engine: requests that it computes, and now and then a reset."""

    def __init__(self, random, corpus, model, life):
        self._random = random
        self._corpus = corpus
        self._engine = model.engine(life)
        self._nodes = self._named_nodes()
        full = {each for each in model.groups if each.kind == "full"}
        self._places = dict.fromkeys(full, int(Tier.DEVICE))
        self._places |= {each: class_of(each) for each in self._engine.shapes}
        self._held = frozenset()

    def held(self):
        """The truth: all blocks of which every group of their shape has a copy."""
        return self._held

    def step(self):
        """Compute a step of what runs; the events of the engine."""
        chance = self._random.random()
        if chance < 0.02:
            self._engine.clear()
        elif chance < 0.6 or not self._engine.running:
            self._begin(self._random.choice(self._corpus.prompts))
        events = [self._salted(event) for event in self._engine.step()]
        self._held = frozenset(self._all_held())
        return events

    def _begin(self, path):
        tokens = tokens_of(path)
        isl_tokens = self._random.randint(1, len(tokens))
        osl_tokens = self._random.randint(0, 3 * BLOCK_SIZE)
        self._engine.begin(tokens[:isl_tokens], tokens[isl_tokens : isl_tokens + osl_tokens])

    def _named_nodes(self):
        """The path of the corpus that ends at each block, by the engine's name of that."""
        named = {}
        for path in self._corpus.prompts:
            tokens = tokens_of(path)
            for blocks in range(1, len(path) + 1):
                named[self._engine.name(tokens, blocks * BLOCK_SIZE)] = path[:blocks]
        return named

    def _all_held(self):
        for shape, place in self._places.items():
            units = shape.block_tokens // BLOCK_SIZE if shape.kind == "full" else 1
            groups = [i for i, each in enumerate(self._engine.groups) if each == shape]
            for name in set.intersection(*(set(self._engine.cached[i]) for i in groups)):
                for node in self._nodes[name][-units:]:
                    yield place, node.sequence_hash

    def _salted(self, event):
        """The event with its extra keys: a salt belongs to the first block of a prompt only."""
        if not isinstance(event, EngineStored):
            return event
        paths = [self._nodes[name] for name in event.block_hashes.tolist()]
        firsts = [len(path) * BLOCK_SIZE == event.block_size for path in paths]
        salts = [path[0].salt if first else None for path, first in zip(paths, firsts, strict=True)]
        return replace(event, extra_keys=[salt and [salt] for salt in salts])


def tokens_of(path):
    """The tokens of a path of nodes."""
    return [token for node in path for token in node.tokens]


def resumed_blocks(held, layout, hashes, isl_tokens):
    """The blocks of a prompt that a rank need not compute again, as the definition says."""
    at = {end * BLOCK_SIZE: each for end, each in enumerate(hashes, 1)}
    found = cached_tokens(
        layout,
        lambda end: (int(Tier.DEVICE), at.get(end)) in held,
        lambda index, end: (layout.classes[index], at.get(end)) in held,
        isl_tokens,
    )
    return found // BLOCK_SIZE


def doubts_of(doubts, hybrid):
    """What keeps a rank from being exact: of a hybrid one with a layout, that layout's problem."""
    if hybrid is None:
        return doubts
    return doubts | _HYBRID if hybrid.layout.problem else doubts & ~_HYBRID


def held_in_classes(hybrid, held_in_class):
    """The blocks of all classes, as pairs of class and hash; `held_in_class(c)`: those of one."""
    classes = () if hybrid is None else hybrid.layout.classes
    return {(each, h) for c, each in enumerate(classes) for h in held_in_class(c).tolist()}

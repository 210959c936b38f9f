"""What engines say, built by hand, with what does not matter filled in."""

import numpy as np
from xxhash import xxh3_64_intdigest

from router.protocol.requests import BlockMmInfo, MmObject
from router.protocol.values import SCHEME, Doubt, Identity, Rank, Tier
from router.publisher.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineRemoved,
    EngineStored,
)
from router.publisher.journal import EventJournal
from router.publisher.normalizer import DEFAULT_LIMITS, Normalizer
from router.publisher.normalizer_settings import EngineSettings
from router.sequence.hashing import chain, hash_seed, local_block_hashes, token_array

U64 = 2**64
IDENTITY = Identity(SCHEME, 4)


def engine_hashes(hashes):
    """Hashes as engines send them: signed, unsigned, or bytes."""
    return np.array([engine_hash(h) for h in hashes], dtype=np.uint64)


def engine_hash(name):
    return xxh3_64_intdigest(name) if isinstance(name, bytes) else name % U64


def stored(hashes, tokens, parent=None, *, block_size=4, **fields):
    return EngineStored(engine_hashes(hashes), parent, token_array(tokens), block_size, **fields)


def placeholder(hashes, parent=None, *, medium="CPU", **fields):
    return stored(hashes, [], parent, block_size=0, medium=medium, **fields)


def removed(hashes, medium=None, group=0):
    return EngineRemoved(engine_hashes(hashes), medium, group)


def batch(*events, unknown=(), malformed=()):
    return EngineBatch(0, list(events), unknown, malformed)


CLEARED = EngineCleared()


class Edge:
    """A normaliser, its journal, and a clock."""

    def __init__(self, identity=IDENTITY, limits=DEFAULT_LIMITS, *, settings=None, **fields):
        self.journal = EventJournal(Rank(7, 0), 1, identity)
        self.settings = settings or EngineSettings(**fields)
        self.normalizer = Normalizer(self.journal, identity, limits, self.settings)
        self.now_s = 100.0

    def feed(self, *events, **fields):
        self.normalizer.apply(batch(*events, **fields), self.now_s)
        self.normalizer.check_invariants()
        return self

    def held(self, tier=Tier.DEVICE):
        return set(self.journal.held(tier).tolist())

    @property
    def doubts(self):
        return Doubt(self.journal.state.doubts)

    @property
    def counts(self):
        return self.normalizer.stats.counts

    @property
    def orphans(self):
        return self.normalizer.stats.orphan_blocks


def names(tokens, *, block_size=4, lora_name=None, cache_salt=None, mm=None, eagle=False):
    """What the router calls a prompt's blocks."""
    infos = mm and [BlockMmInfo([MmObject(h) for h in hashes]) for hashes in mm]
    seed = hash_seed(lora_name, cache_salt)
    return chain(
        local_block_hashes(
            token_array(tokens), block_size, seed=seed, block_mm_infos=infos, eagle=eagle
        )
    ).tolist()

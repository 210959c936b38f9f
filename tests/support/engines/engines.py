"""What engines say, built by hand, with what does not matter filled in."""

from itertools import groupby

import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from router.protocol.requests import BlockMmInfo, MmObject
from router.protocol.values import SCHEME, Doubt, Identity, Rank, Tier
from router.publisher.engine_events.batch import (
    EngineBatch,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    StoredRun,
)
from router.publisher.journal.held_blocks import path_heads
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import DEFAULT_LIMITS, Normalizer
from router.publisher.normalizer.settings import EngineSettings
from router.sequence.hashing.block_hashes import chain, hash_seed, local_block_hashes, token_array
from router.sequence.hashing.keyed_hashes import PLAIN

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


def batch(*events, unknown=(), malformed=(), **fields):
    return EngineBatch(0, joined(events), unknown, malformed, **fields)


def joined(events):
    """Parts of a batch as decoding makes them of these events: what is alike in runs."""
    parts = []
    for kind, alike in groupby(enumerate(events), lambda each: kinship(*each)):
        run = [event for _, event in alike]
        if kind[0] == "stored" and len(run) > 1:
            parts.append(StoredRun(whole_of(run), heads_of(run)))
        else:
            parts += run
    return parts


def kinship(place, event):
    """What the events of one run have in common; others have nothing in common with any."""
    if not isinstance(event, EngineStored) or not len(event.block_hashes):
        return ("alone", place)
    if event.local_hashes is not None:
        return ("alone", place)
    if event.lora_name or event.cache_salt or event.lora_id or event.extra_keys:
        return ("alone", place)
    labels = (event.medium, event.locality, event.group, event.spec_kind, event.is_eagle)
    window, size = event.sliding_window_tokens, event.block_size
    return ("stored", *labels, window, size, len(event.tokens) - len(event.block_hashes) * size)


def whole_of(run):
    hashes = np.concatenate([event.block_hashes for event in run])
    tokens = np.concatenate([event.tokens for event in run])
    return replace(run[0], block_hashes=hashes, tokens=tokens)


def heads_of(run):
    sizes = [len(event.block_hashes) for event in run]
    return path_heads(sizes, [event.parent for event in run])


CLEARED = EngineCleared()


class Edge:
    """A normaliser, its journal, and a clock."""

    def __init__(
        self, identity=IDENTITY, limits=DEFAULT_LIMITS, *, settings=None, naming=PLAIN, **fields
    ):
        self.journal = EventJournal(Rank(7, 0), 1, identity, naming=naming)
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

"""What one engine's blocks are called, and how many copies there are: told to the journal."""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.protocol.values import U64_MAX, HashArray, Identity, Tier
from router.publisher import _map_kernel, _map_store
from router.publisher._map_store import DONE, HASHED, INHERITED, TOLD_WORDS
from router.publisher.contexts import PLAIN, UNTOLD, Contexts, opaque_hash
from router.publisher.counted_journal import CountedJournal
from router.publisher.engine_batch import EngineRemoved, EngineStored, StoredRun
from router.publisher.engine_map import EngineMap
from router.publisher.extra_keys import BlockKeys, EventKeys, read_extra_keys
from router.publisher.held import path_heads
from router.publisher.map_invariants import names_held
from router.sequence._hash_kernel import block_hashes
from router.sequence.hashing import TokenArray

_LOW = 0xFFFFFFFF


class Refused(Struct, frozen=True):
    """An event that cannot be true, or for which there is no room: nothing of it was done."""

    reason: str


class UnknownParent(Struct, frozen=True):
    """Blocks that cannot be named yet; nothing was done."""


UNKNOWN_PARENT = UnknownParent()

_NO_ROOM = Refused("the limit on known blocks is reached")
_DUPLICATE = Refused("a block comes twice, or is its own parent")
_CONFLICT = Refused("a known block has other tokens or another parent")
_JOIN_REFUSALS = {_map_kernel.NO_ROOM: _NO_ROOM, _map_kernel.DUPLICATE: _DUPLICATE}
_STORE_OUTCOMES = {
    0: None,
    _map_store.UNKNOWN_PARENT: UNKNOWN_PARENT,
    _map_store.CONFLICT: _CONFLICT,
    **_JOIN_REFUSALS,
}


class BlockNames:
    """Map, contexts and journal of one rank.

    Invariant: the journal holds exactly the named blocks that have copies, by tier.

    `untold_events`: those whose context was one too many.
    """

    __slots__ = (
        "_block_size",
        "_how",
        "_identity",
        "_window",
        "contexts",
        "journal",
        "map",
        "untold_events",
    )

    def __init__(
        self,
        journal: CountedJournal,
        identity: Identity,
        contexts: Contexts,
        engine_map: EngineMap,
        *,
        is_full: bool,
    ) -> None:
        self.journal = journal
        self.contexts = contexts
        self.map = engine_map
        self._identity = identity
        self._block_size = identity.block_size
        self._window = identity.block_size + identity.eagle
        self._how = _map_kernel.FULL if is_full else 0
        self.untold_events = 0

    def store_run(self, run: StoredRun, tier: Tier | None) -> int:
        """Store events of a run, up to one that has to be stored by itself; how many were stored.
        Blocks are of full size. O(tokens).
        """
        whole, blocks = run.whole, run.blocks_of(len(run))
        if not self._has_plain_tokens(run):
            return 0
        out = np.empty(4 * blocks + TOLD_WORDS, np.uint64)
        heads = run.heads.copy()  # kernels write into them
        self._store(whole.block_hashes, whole.tokens, heads, whole.group, INHERITED, tier, 0, out)
        return int(out[4 * blocks + DONE])

    def store(self, event: EngineStored, tier: Tier | None) -> UnknownParent | Refused | None:
        """Name blocks of full size, and count them in a tier if there is one. O(tokens)."""
        tokens = self._tokens(event)
        if isinstance(tokens, Refused):
            return tokens
        hashes, context, how = event.block_hashes, INHERITED, 0
        heads = path_heads([len(hashes)], [event.parent])
        out = np.empty(4 * len(hashes) + TOLD_WORDS, np.uint64)
        if _says_more(event):
            keys = _keys(event)
            context = self._context(event, keys)
            if context < 0:
                return UNKNOWN_PARENT
            if keys.blocks:
                self._hash(tokens, context, keys.blocks, out[: len(hashes)])
                how = HASHED
        refusal = self._store(hashes, tokens, heads, event.group, context, tier, how, out)
        return _STORE_OUTCOMES[refusal]

    def _store(
        self,
        hashes: HashArray,
        tokens: TokenArray,
        heads: HashArray,
        group: int,
        context: int,
        tier: Tier | None,
        how: int,
        out: HashArray,
    ) -> int:
        """Store events, and tell the journal of those that were; why the next one was not."""
        how |= self._how | (_map_kernel.NO_TIER if tier is None else tier)
        size, window = self._block_size, self._window
        refusal = self.map.store(hashes, tokens, heads, size, window, group, context, how, out)
        done, firsts, masks = out[-TOLD_WORDS:].tolist()
        room = blocks = len(hashes)
        if refusal:
            blocks = int(heads[3 * done])
            heads = heads[: 3 * done]
        if tier is not None:
            self.journal.stored(tier, out[:blocks], heads, out[room : room + firsts])
        if masks:
            self._tell_found(out[:blocks], out[2 * room :], heads)
        return refusal

    def _has_plain_tokens(self, run: StoredRun) -> bool:
        """Are a run's tokens as kernels read them, and as many as each of its events needs?"""
        eagle = self._identity.eagle
        needed = run.blocks_of(len(run)) * self._block_size + len(run) * eagle
        return run.whole.is_eagle == eagle and len(run.whole.tokens) == needed

    def _tokens(self, event: EngineStored) -> TokenArray | Refused:
        """An event's tokens one by one, as many as its blocks need."""
        tokens, eagle = event.tokens, self._identity.eagle
        needed = len(event.block_hashes) * self._block_size + eagle
        if event.is_eagle != eagle:
            return Refused("tokens in pairs, or not, unlike registered")
        if eagle and len(tokens) == 2 * (needed - 1):
            tokens = np.append(tokens[::2], tokens[-1:])
        if len(tokens) < needed:
            return Refused(f"{len(tokens)} tokens, its blocks have {needed}")
        return tokens if len(tokens) == needed else tokens[:needed]

    def join(self, hashes: HashArray, group: int, tier: Tier) -> int | Refused:
        """Count blocks in a tier by the names they have; how many have none, and are orphans."""
        out = np.empty(4 * len(hashes), np.uint64)
        told = self.map.join(hashes, group, self._how | tier, out)
        if told < 0:
            return _JOIN_REFUSALS[told]
        named, parts = told & _LOW, out.reshape(4, len(hashes))
        self.journal.stored(tier, *_paths(parts[:3, :named]), parts[3, : told >> 32])
        return len(hashes) - named

    def remove(self, event: EngineRemoved, tier: Tier) -> None:
        """One copy of each block is gone from a tier. O(blocks)."""
        gone = self.map.remove(event.block_hashes, event.group, tier)
        if len(gone):
            self.journal.removed(tier, gone)

    def clear(self, tier: Tier) -> Iterator[None]:
        """All copies are gone from a tier, slice by slice. O(blocks known)."""
        if self.map.copies(tier):
            yield from self.map.clear(tier)
            self.journal.cleared(tier)

    def tell_all(self) -> None:
        """Tell an empty journal what is held. O(blocks known)."""
        for tier in Tier:
            self.journal.stored(tier, *_paths(self.map.paths(tier)), None)

    def check_invariants(self) -> None:
        """Assert the invariants of names, counts and contexts. O(blocks known)."""
        self.map.check_invariants()
        self.journal.check_invariants(names_held(self.map.rows()))

    def _context(self, event: EngineStored, keys: EventKeys) -> int:
        """The number of an event's context; -1 while its parent is unknown.

        Where all numbers are in use, half of the graveyard gives up its own.
        """
        parent = PLAIN
        if event.parent is not None:
            parent = self.map.context_of(event.parent, event.group)
            if parent < 0:
                return parent
        is_nameless = bool(event.lora_id) and not keys.lora_name
        opaque = f"lora_id:{event.lora_id}".encode() if is_nameless else None
        context = self.contexts.derived(parent, keys.lora_name, keys.cache_salt, opaque)
        if context == UNTOLD != parent:
            self.map.forget_dead(self.map.dead_blocks // 2)
            context = self.contexts.derived(parent, keys.lora_name, keys.cache_salt, opaque)
        self.untold_events += context == UNTOLD
        return context

    def _hash(
        self, tokens: TokenArray, context: int, blocks: dict[int, BlockKeys], out: HashArray
    ) -> None:
        """Local hashes of blocks, some of which cover more than their tokens."""
        seed = int(self.contexts.seeds[context])
        block_hashes(tokens, self._block_size, self._window, seed, out)
        for index, keys in blocks.items():
            start = index * self._block_size
            content = tokens[start : start + self._window].tobytes()
            content += np.array(sorted(keys.mm_hashes), "<u8").tobytes()
            own_seed = seed + opaque_hash(keys.opaque) if keys.opaque else seed
            out[index] = xxh3_64_intdigest(content, own_seed & U64_MAX)

    def _tell_found(self, hashes: HashArray, masks: HashArray, heads: HashArray) -> None:
        """Orphans have names now: what they were counted in is told after all."""
        starts = {
            first: parent if is_given else None
            for first, parent, is_given in heads.reshape(-1, 3).tolist()
        }
        parent = None
        for place, sequence_hash in enumerate(hashes.tolist()):
            parent, mask = starts.get(place, parent), int(masks[place])
            head, one = path_heads([1], [parent]), hashes[place : place + 1]
            for tier in Tier:
                if mask >> tier & 1:
                    self.journal.stored(tier, one, head, one)
            parent = sequence_hash


def _paths(told: HashArray) -> tuple[HashArray, HashArray]:
    """Hashes and heads of paths as kernels tell them: hashes, parents, beginnings."""
    hashes, parents, kinds = told
    begins = np.flatnonzero(kinds)
    heads = np.empty((len(begins), 3), np.uint64)
    heads[:, 0], heads[:, 1], heads[:, 2] = begins, parents[begins], kinds[begins] == 1
    return hashes, heads.ravel()


def _says_more(event: EngineStored) -> bool:
    """Does an event say anything of its blocks' context?"""
    if event.lora_name or event.cache_salt or event.lora_id:
        return True
    return event.extra_keys is not None and any(event.extra_keys)


def _keys(event: EngineStored) -> EventKeys:
    keys = EventKeys(event.lora_name or None, event.cache_salt or None)
    if event.extra_keys is not None:
        blocks, is_root = len(event.block_hashes), event.parent is None
        read_extra_keys(event.extra_keys, keys, blocks, is_root=is_root)
    return keys

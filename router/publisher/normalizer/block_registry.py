"""The sequence hashes and copy counts of one engine's blocks, published to the journal."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.protocol.values import U64_MAX, HashArray, Identity, Tier
from router.publisher.engine_events.batch import EngineRemoved, EngineStored, StoredRun
from router.publisher.engine_events.extra_keys import BlockKeys, EventKeys, read_extra_keys
from router.publisher.journal.held_blocks import path_heads
from router.publisher.normalizer import _map_kernel, _map_store
from router.publisher.normalizer._map_store import CONFLICT, DONE, HASHED, INHERITED, TOLD_WORDS
from router.publisher.normalizer.contexts import PLAIN, UNTOLD, Contexts, opaque_hash
from router.publisher.normalizer.engine_map import EngineMap
from router.publisher.normalizer.map_invariants import names_held
from router.publisher.normalizer.refcounted_journal import RefcountedJournal
from router.sequence.hashing._hash_kernel import block_hashes
from router.sequence.hashing.block_hashes import TokenArray, chain_hash

_LOW = 0xFFFFFFFF


class BlockRefused(Struct, frozen=True):
    """An event that is contradictory or exceeds a limit; nothing of it was applied."""

    reason: str


class UnknownParent(Struct, frozen=True):
    """The result for blocks that cannot be named yet; nothing was applied."""


UNKNOWN_PARENT = UnknownParent()

_NO_ROOM = BlockRefused("the limit on known blocks is reached")
_DUPLICATE = BlockRefused("a block occurs twice, or is its own parent")
_CONFLICT = BlockRefused("a known block has other tokens or another parent")
_JOIN_REFUSALS = {_map_kernel.NO_ROOM: _NO_ROOM, _map_kernel.DUPLICATE: _DUPLICATE}
_STORE_OUTCOMES = {
    0: None,
    _map_store.UNKNOWN_PARENT: UNKNOWN_PARENT,
    CONFLICT: _CONFLICT,
    **_JOIN_REFUSALS,
}


class BlockRegistry:
    """The map, contexts and journal of one rank.

    Invariant: the journal holds exactly the named blocks that have copies, by tier.

    `untold_events`: the number of events with a context beyond the limit.
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
        journal: RefcountedJournal,
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
        """Store events of a run, up to one that has to be stored alone.

        Returns the number of events stored. Blocks must be of full size. O(tokens).
        """
        whole, blocks = run.whole, run.blocks_of(len(run))
        if not self._has_plain_tokens(run):
            return 0
        out = np.empty(4 * blocks + TOLD_WORDS, np.uint64)
        heads = run.heads.copy()  # Kernels write into them.
        self._store(whole.block_hashes, whole.tokens, heads, whole.group, INHERITED, tier, 0, out)
        return int(out[4 * blocks + DONE])

    def store(self, event: EngineStored, tier: Tier | None) -> UnknownParent | BlockRefused | None:
        """Name blocks of full size, and count them in `tier` unless it is None. O(tokens)."""
        if event.local_hashes is not None:
            return self._store_hashed(event, event.local_hashes, tier)
        tokens = self._tokens(event)
        if isinstance(tokens, BlockRefused):
            return tokens
        hashes, context, how = event.block_hashes, INHERITED, 0
        heads = path_heads([len(hashes)], [event.parent])
        out = np.empty(4 * len(hashes) + TOLD_WORDS, np.uint64)
        if _has_context(event):
            keys = _keys(event)
            context = self._context(event, keys)
            if context < 0:
                return UNKNOWN_PARENT
            if keys.blocks:
                self._hash(tokens, context, keys.blocks, out[: len(hashes)])
                how = HASHED
        refusal = self._store(hashes, tokens, heads, event.group, context, tier, how, out)
        return _STORE_OUTCOMES[refusal]

    def _store_hashed(
        self, event: EngineStored, local_hashes: HashArray, tier: Tier | None
    ) -> UnknownParent | BlockRefused | None:
        """Store blocks with local hashes in place of tokens.

        Their publishers may use an engine hash again for other content, which replaces the former
        block unless an orphan is only named now.
        """
        hashes = event.block_hashes
        if len(local_hashes) != len(hashes):
            return BlockRefused(f"{len(local_hashes)} local hashes of {len(hashes)} blocks")
        args = event.tokens, path_heads([len(hashes)], [event.parent]), event.group, INHERITED, tier
        out = np.empty(4 * len(hashes) + TOLD_WORDS, np.uint64)
        out[: len(hashes)] = local_hashes
        refusal = self._store(hashes, *args, HASHED, out)
        if refusal == CONFLICT and tier is not None:
            names, masks = self.map.supersede(hashes, local_hashes, args[1], event.group)
            for each in Tier:
                gone = names[masks >> np.uint64(each) & np.uint64(1) == 1]
                self.journal.removed(each, gone, event.group)
            out[: len(hashes)] = local_hashes
            refusal = self._store(hashes, *args, HASHED, out)
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
        """Store events, and publish the stored ones to the journal.

        Returns the reason why the next event was refused, or 0.
        """
        how |= self._how | (_map_kernel.NO_TIER if tier is None else tier)
        size, window = self._block_size, self._window
        refusal = self.map.store(hashes, tokens, heads, size, window, group, context, how, out)
        done, firsts, masks = out[-TOLD_WORDS:].tolist()
        room = blocks = len(hashes)
        if refusal:
            blocks = int(heads[3 * done])
            heads = heads[: 3 * done]
        if tier is not None:
            self.journal.stored(tier, out[:blocks], heads, out[room : room + firsts], group)
        if masks:
            self._publish_found(out[:blocks], out[2 * room :], heads, group)
        return refusal

    def _has_plain_tokens(self, run: StoredRun) -> bool:
        """Return whether a run's tokens are as kernels need them, and complete for its events."""
        eagle = self._identity.eagle
        needed = run.blocks_of(len(run)) * self._block_size + len(run) * eagle
        return run.whole.is_eagle == eagle and len(run.whole.tokens) == needed

    def _tokens(self, event: EngineStored) -> TokenArray | BlockRefused:
        """Return an event's tokens one by one, as many as its blocks need, or a refusal."""
        tokens, eagle = event.tokens, self._identity.eagle
        needed = len(event.block_hashes) * self._block_size + eagle
        if event.is_eagle != eagle:
            return BlockRefused("tokens are in pairs, or not, contrary to the registration")
        if eagle and len(tokens) == 2 * (needed - 1):
            tokens = np.append(tokens[::2], tokens[-1:])
        if len(tokens) < needed:
            return BlockRefused(f"{len(tokens)} tokens, but its blocks need {needed}")
        return tokens if len(tokens) == needed else tokens[:needed]

    def join(self, hashes: HashArray, group: int, tier: Tier) -> int | BlockRefused:
        """Count blocks without tokens in a tier.

        Returns the number of orphans, the blocks without a name.
        """
        out = np.empty(4 * len(hashes), np.uint64)
        told = self.map.join(hashes, group, self._how | tier, out)
        if told < 0:
            return _JOIN_REFUSALS[told]
        named, parts = told & _LOW, out.reshape(4, len(hashes))
        self.journal.stored(tier, *_paths(parts[:3, :named]), parts[3, : told >> 32], group)
        return len(hashes) - named

    def remove(self, event: EngineRemoved, tier: Tier) -> None:
        """Remove one copy of each block from a tier. O(blocks)."""
        gone = self.map.remove(event.block_hashes, event.group, tier)
        if len(gone):
            self.journal.removed(tier, gone, event.group)

    def clear(self, tier: Tier) -> Iterator[None]:
        """Remove all copies from a tier, in slices. O(blocks known)."""
        if self.map.copies(tier):
            yield from self.map.clear(tier)
            self.journal.cleared(tier)

    def ends(
        self, event: EngineStored, groups: Sequence[int], names: Mapping[int, int]
    ) -> list[int] | None:
        """Return the sequence hash at the end of each block of the identity's size in a span.

        The span is that of an event's tokens; nothing is stored. The parent is looked up in the
        full-attention `groups`, then in `names`. Returns None if it is unknown, or if blocks
        contain more than tokens. O(tokens).
        """
        size, parent_name, context = self._block_size, None, PLAIN
        keys = _keys(event)
        if keys.blocks or event.is_eagle or self._identity.eagle:
            return None
        if event.parent is not None:
            parent_name, context = self._parent(event.parent, groups, names)
            if parent_name is None:
                return None
        derived = self.contexts.derived(context, keys.lora_name, keys.cache_salt, None)
        local_hashes = np.empty(len(event.tokens) // size, np.uint64)
        block_hashes(event.tokens, size, size, int(self.contexts.seeds[derived]), local_hashes)
        ends: list[int] = []
        for each in local_hashes.tolist():
            parent_name = chain_hash(parent_name, each)
            ends.append(parent_name)
        return ends

    def _parent(
        self, engine_hash: int, groups: Sequence[int], names: Mapping[int, int]
    ) -> tuple[int | None, int]:
        """Return the sequence hash and the context of a parent. Returns None if it is unknown."""
        hashes = np.array([engine_hash], np.uint64)
        for group in groups:
            found, is_known, _ = self.map.look(hashes, group)
            if is_known[0]:
                return int(found[0]), self.map.context_of(engine_hash, group)
        return names.get(engine_hash), PLAIN

    def publish_all(self) -> None:
        """Publish all held blocks to an empty journal. O(blocks known)."""
        for tier in Tier:
            self.journal.publish(tier, *_paths(self.map.paths(tier)))

    def check_invariants(self) -> None:
        """Assert the invariants of names, counts and contexts. O(blocks known)."""
        self.map.check_invariants()
        self.journal.check_invariants(names_held(self.map.rows()))

    def _context(self, event: EngineStored, keys: EventKeys) -> int:
        """Return the number of an event's context, or -1 if its parent is unknown.

        If all numbers are in use, the older half of the dead blocks is forgotten to free some.
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
        """Write local hashes of blocks, some of which cover more than their tokens."""
        seed = int(self.contexts.seeds[context])
        block_hashes(tokens, self._block_size, self._window, seed, out)
        for index, keys in blocks.items():
            start = index * self._block_size
            content = tokens[start : start + self._window].tobytes()
            content += np.array(sorted(keys.mm_hashes), "<u8").tobytes()
            own_seed = seed + opaque_hash(keys.opaque) if keys.opaque else seed
            out[index] = xxh3_64_intdigest(content, own_seed & U64_MAX)

    def _publish_found(
        self, hashes: HashArray, masks: HashArray, heads: HashArray, group: int
    ) -> None:
        """Publish the tiers of former orphans, which have names now."""
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
                    self.journal.stored(tier, one, head, one, group)
            parent = sequence_hash


def _paths(told: HashArray) -> tuple[HashArray, HashArray]:
    """Return hashes and heads of paths from the kernels' form: hashes, parents, beginnings."""
    hashes, parents, kinds = told
    begins = np.flatnonzero(kinds)
    heads = np.empty((len(begins), 3), np.uint64)
    heads[:, 0], heads[:, 1], heads[:, 2] = begins, parents[begins], kinds[begins] == 1
    return hashes, heads.ravel()


def _has_context(event: EngineStored) -> bool:
    """Return whether an event contains anything about its blocks' context."""
    if event.lora_name or event.cache_salt or event.lora_id:
        return True
    return event.extra_keys is not None and any(event.extra_keys)


def _keys(event: EngineStored) -> EventKeys:
    keys = EventKeys(event.lora_name or None, event.cache_salt or None)
    if event.extra_keys is not None:
        blocks, is_root = len(event.block_hashes), event.parent is None
        read_extra_keys(event.extra_keys, keys, blocks, is_root=is_root)
    return keys

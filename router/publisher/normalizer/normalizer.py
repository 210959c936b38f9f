"""The conversion of one engine's events into canonical ones; only this code sees engine hashes.

    EngineBatch ─▶ Normalizer ─ full attention ─▶ BlockRegistry ─ sequence hashes ─▶ EventJournal
                    │  └ OrphanBlocks  children that     ├ EngineMap  engine hash ─▶ name, copies
                    │                  lack parents      └ Contexts   LoRA and salt, inherited
                    └ other groups ─▶ ClassBlocks ─ names, by class ─────────────────▶ EventJournal

A block is held in a tier until its last copy there is removed. Inexact information is a doubt,
which the journal publishes with the state.
"""

from collections.abc import Iterator, Sequence

import msgspec

from router.protocol.values import Doubt, Identity, Tier
from router.publisher.engine_events.batch import (
    EngineBatch,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    StoredRun,
)
from router.publisher.engine_events.slices import SLICE_BLOCKS, BlocksPart, block_count, sliced
from router.publisher.hybrid.class_blocks import ClassBlocks
from router.publisher.hybrid.full_blocks import divided, unit_hashes
from router.publisher.hybrid.groups import AttentionGroups
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.block_registry import BlockRefused, BlockRegistry
from router.publisher.normalizer.contexts import Contexts
from router.publisher.normalizer.degraded_reasons import DegradedReasons
from router.publisher.normalizer.engine_map import EngineMap
from router.publisher.normalizer.mediums import tier_of
from router.publisher.normalizer.orphans import OrphanBlocks
from router.publisher.normalizer.refcounted_journal import RefcountedJournal
from router.publisher.normalizer.settings import (
    EngineSettings,
    NormalizerCounts,
    NormalizerLimits,
    NormalizerStats,
)
from router.publisher.normalizer.state import (
    SavedParts,
    decode_state,
    normalizer_state,
    put_back,
    state_parts,
)

_MAX_COMPLAINTS = 16

DEFAULT_LIMITS = NormalizerLimits()
DEFAULT_SETTINGS = EngineSettings()


class Normalizer:
    """The normaliser of one rank, the only writer of its journal.

    Invariants: the journal holds exactly the named blocks that have copies, by tier, and contains
    the current doubts.
    """

    __slots__ = (
        "_block_size",
        "_classes",
        "_complaints",
        "_counts",
        "_doubts",
        "_groups",
        "_held_back",
        "_identity",
        "_journal",
        "_limits",
        "_names",
        "_settings",
    )

    def __init__(
        self,
        journal: SourceJournal,
        identity: Identity,
        limits: NormalizerLimits = DEFAULT_LIMITS,
        settings: EngineSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._journal = journal
        self._identity = identity
        self._block_size = identity.block_size
        self._limits = limits
        self._settings = settings
        self._counts = NormalizerCounts()
        self._complaints: list[str] = []
        self._doubts = DegradedReasons(journal, settings, limits.doubt_after_s)
        self._groups = AttentionGroups(self._block_size, settings.hybrid)
        self._begin()

    def _begin(self) -> None:
        contexts = Contexts(self._limits.contexts)
        pool_blocks = self._settings.num_gpu_blocks
        self._names = BlockRegistry(
            RefcountedJournal(self._journal),
            self._identity,
            contexts,
            EngineMap(contexts, self._limits.known_blocks, pool_blocks),
            is_full=self._settings.report_mode != "new",
        )
        self._held_back = OrphanBlocks(self._limits.held_back_blocks, self._limits.held_back_s)
        self._classes = ClassBlocks(self._journal, self._groups, self._limits.known_blocks)

    @property
    def journal(self) -> SourceJournal:
        """The journal that it writes to."""
        return self._journal

    @property
    def stats(self) -> NormalizerStats:
        """The totals and current sizes. O(1)."""
        return NormalizerStats(
            counts=self._total(),
            orphan_blocks=self._names.map.orphan_blocks,
            waiting_blocks=self._held_back.blocks,
            known_blocks=len(self._names.map),
            dead_blocks=self._names.map.dead_blocks,
            device_copies=self._names.map.copies(Tier.DEVICE),
            contexts=len(self._names.contexts),
        )

    @property
    def map(self) -> EngineMap:
        """The map of engine hashes; a new life starts with a new map."""
        return self._names.map

    @property
    def unknown_field(self) -> str | None:
        """The sentence about a field of its events that is unknown, while that is a doubt."""
        return self._doubts.unknown_field

    def take_complaints(self) -> Sequence[str]:
        """Return warnings, one for each event refused since the last call, up to a limit."""
        complaints, self._complaints = self._complaints, []
        return complaints

    def apply(self, batch: EngineBatch, now_s: float) -> None:
        """Apply one batch of this rank, in the engine's order. O(blocks)."""
        for _ in self.apply_slices(batch, now_s):
            pass

    def apply_slices(self, batch: EngineBatch, now_s: float) -> Iterator[int]:
        """Apply a batch in slices; the iterator must be exhausted before any other call.

        Yields before each slice the number of its blocks. Blocks of groups other than full
        attention are applied last, when those have named them.
        """
        self._groups.note(batch)
        for part in batch.parts:
            if isinstance(part, EngineCleared):
                yield 0
                self._settle_classes()
                for _ in self._apply_cleared(part.tier):
                    yield SLICE_BLOCKS
            elif self._groups.is_hybrid and self._is_of_class(part):
                self._add_to_class(part)
            elif (blocks := block_count(part)) <= SLICE_BLOCKS:
                yield blocks
                self._apply_part(part, now_s)
            else:
                for each in sliced(part, self._block_size, self._identity.eagle):
                    yield block_count(each)
                    self._apply_part(each, now_s)
        self._settle_classes()
        self._note_unread(batch)
        self.tick(now_s)

    def _is_of_class(self, part: BlocksPart) -> bool:
        """Return whether a part is of another group than full attention, or of tails."""
        event = part.whole if isinstance(part, StoredRun) else part
        if not self._groups.is_full(event.group):
            return True
        return isinstance(event, EngineStored) and self._groups.is_tail(event)

    def _add_to_class(self, part: BlocksPart) -> None:
        """Queue a part of a group other than full attention, whose blocks are on the device."""
        event = part.whole if isinstance(part, StoredRun) else part
        self._counts.class_blocks += len(event.block_hashes)
        if tier_of(event.medium, event.locality) is Tier.DEVICE:
            self._classes.add(part)

    def _settle_classes(self) -> None:
        """Apply the blocks of other groups; while there are such groups, the rank says so."""
        for _ in range(self._classes.settle(self._names)):
            self._refuse("the limit on known blocks is reached")
        self._doubts.is_hybrid = self._groups.is_hybrid
        if self._groups.is_hybrid:
            self._doubts.units_per_block = max(map(self._groups.units, self._groups.full_groups))

    def _note_unread(self, batch: EngineBatch) -> None:
        """Count the events of a batch that were dropped; doubt what was not understood."""
        if batch.unknown:
            self._counts.unknown_events += len(batch.unknown)
        if batch.malformed:
            self._counts.malformed_events += len(batch.malformed)
            self._doubts.add(Doubt.UNREADABLE)
        if batch.unknown_field is not None:
            self._doubts.note_unknown_field(batch.unknown_field)
        if batch.has_full_only:
            self._doubts.has_full_only = True

    def _apply_part(self, part: BlocksPart, now_s: float) -> None:
        if isinstance(part, StoredRun):
            self._apply_stored(part.whole, part, now_s)
        elif isinstance(part, EngineStored):
            self._apply_stored(part, None, now_s)
        else:
            self._apply_removed(part)

    def tick(self, now_s: float) -> None:
        """Drop children that have waited for their parents too long, and publish the doubts.

        O(dropped).
        """
        if self._held_back.blocks:
            self._held_back.expire(now_s)
        self._doubts.publish(self._names.map, now_s)

    def reset(self, settings: EngineSettings | None = None) -> None:
        """Start a new life of the engine: without known or held blocks, and without doubts.

        `settings`: the way it reports from now on; None: the same.
        """
        self._settings = settings or self._settings
        self._groups = AttentionGroups(self._block_size, self._settings.hybrid)
        self._drop_all()
        self._doubts.begin(self._settings)
        self._doubts.publish(self._names.map, 0.0)

    def note_gap(self) -> None:
        """Process a loss of events of a publisher without replay: keep the blocks, and doubt."""
        self._doubts.add(Doubt.EVENTS_LOST)

    def events_lost(self) -> None:
        """Process a loss of events: drop all blocks; doubt until the engine clears everything."""
        self._drop_all()
        self._doubts.lose()
        self._doubts.publish(self._names.map, 0.0)

    def _drop_all(self) -> None:
        self._classes.clear()
        if any(self._journal.state.counts):
            self._journal.cleared()
        self._counts = self._total()
        self._begin()

    def save(self) -> SavedParts:
        """Return the whole state, for `load`. It must be read before any other call.

        O(blocks known), nearly all of it without holding the interpreter lock.
        """
        parts = self._names, self._groups, self._classes, self._held_back, self._doubts
        _, rows = self._names.map.saved()
        return state_parts(normalizer_state(self._identity, *parts, self._total()), rows)

    def load(self, saved: bytes, now_s: float) -> None:
        """Restore a saved state into a new normaliser with an empty journal.

        The waiting time of children without parents starts again. Raises NormalizerStateError,
        without a change. O(blocks known).
        """
        state = decode_state(saved, self._identity)
        parts = self._names, self._groups, self._classes, self._held_back, self._doubts
        put_back(state, *parts, now_s)
        self._counts = state.counts
        self._doubts.is_hybrid = self._groups.is_hybrid
        self._doubts.publish(self._names.map, now_s)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks known)."""
        self._names.check_invariants()
        self._classes.check_invariants()
        self._doubts.check_invariants(self._names.map)

    def _apply_stored(self, event: EngineStored, run: StoredRun | None, now_s: float) -> None:
        """Apply a stored event, or those of a run, of which `event` is the whole."""
        if not len(event.block_hashes):
            return
        tier = tier_of(event.medium, event.locality)
        if tier is None:
            self._counts.unknown_medium += len(event.block_hashes)
        elif tier:
            self._doubts.may_have_lower_tiers = True
        if event.block_size != self._block_size:
            for each in (event,) if run is None else run.events():
                self._store_other_size(each, tier, now_s)
        elif run is None:
            self._store_one(event, tier, now_s)
        else:
            self._store_run(run, tier, now_s)

    def _store_run(self, run: StoredRun, tier: Tier | None, now_s: float) -> None:
        """Store a run at once, as far as possible; one by one while children wait to be named."""
        done = 0
        if not self._held_back.blocks:
            done = self._names.store_run(run, tier)
            self._counts.stored += run.blocks_of(done)
        if done < len(run):
            for event in run.events(done):
                self._store_one(event, tier, now_s)

    def _store_one(self, event: EngineStored, tier: Tier | None, now_s: float) -> None:
        outcome = self._names.store(event, tier)
        if outcome is None:
            self._counts.stored += len(event.block_hashes)
            if self._held_back.blocks:
                self._resolve(event)
        elif isinstance(outcome, BlockRefused):
            self._refuse(outcome.reason)
        else:
            self._hold_back(event, tier, now_s)

    def _store_other_size(self, event: EngineStored, tier: Tier | None, now_s: float) -> None:
        if event.block_size == 0 and not len(event.tokens):
            self._store_tokenless(event, tier)
        elif 0 < event.block_size < self._block_size and len(event.block_hashes) == 1:
            self._counts.partial += 1
        elif self._groups.is_hybrid and (units := divided(event, self._block_size)) is not None:
            self._store_one(units, tier, now_s)
        else:
            self._refuse(
                f"blocks of {event.block_size} tokens, registered {self._block_size}: if it serves "
                f"another model now, register it with block_size {event.block_size}"
            )

    def _store_tokenless(self, event: EngineStored, tier: Tier | None) -> None:
        """Store blocks without tokens, which have engine hashes only."""
        if tier is not None:
            self._counts.stored_without_tokens += len(event.block_hashes)
            self._counts.unnamed_tier += self._join(event, tier)

    def _join(self, event: EngineStored, tier: Tier) -> int:
        """Count blocks by their names. Returns the number of blocks without a name."""
        outcome = self._names.join(event.block_hashes, event.group, tier)
        if isinstance(outcome, BlockRefused):
            self._refuse(outcome.reason)
            return 0
        return outcome

    def _hold_back(self, event: EngineStored, tier: Tier | None, now_s: float) -> None:
        """Store children of an unknown parent as orphans, and keep their content for a while."""
        if tier is not None:
            self._join(event, tier)
        self._counts.held_back += len(event.block_hashes)
        if self._held_back.add(event, now_s):
            self._doubts.drop_orphans()
        if self._held_back.is_purge_due:
            self._held_back.purge(self._names.map.orphans())

    def _resolve(self, event: EngineStored) -> None:
        """Name the children that waited for an event's blocks, then their children."""
        waiting = self._held_back.take(event.group, event.block_hashes.tolist())
        while waiting:
            child = waiting.pop()
            outcome = self._names.store(child, None)
            if isinstance(outcome, BlockRefused):
                self._refuse(outcome.reason)
            elif outcome is None:
                self._counts.resolved += len(child.block_hashes)
                waiting += self._held_back.take(child.group, child.block_hashes.tolist())

    def _apply_removed(self, event: EngineRemoved) -> None:
        tier = tier_of(event.medium, event.locality)
        if tier is None:
            self._counts.unknown_medium += len(event.block_hashes)
        else:
            self._counts.removed += len(event.block_hashes)
            if self._groups.is_hybrid and (units := self._groups.units(event.group)) > 1:
                if self._groups.has_inner_hits:
                    self._classes.add(event)
                hashes = unit_hashes(event.block_hashes, units)
                event = msgspec.structs.replace(event, block_hashes=hashes)
            self._names.remove(event, tier)

    def _apply_cleared(self, only: Tier | None) -> Iterator[None]:
        """Clear one tier, or all that the engine clears at once."""
        self._counts.cleared_events += 1
        clears_all = self._settings.clears_lower_tiers
        is_complete = only is None and (clears_all or not self._doubts.may_have_lower_tiers)
        for tier in Tier if is_complete else (only or Tier.DEVICE,):
            yield from self._names.clear(tier)
        if only in (None, Tier.DEVICE):
            self._classes.clear()
        if only is not None:
            is_complete = not any(map(self._names.map.copies, Tier))
        if is_complete:
            self._held_back.clear()
        if is_complete or not only:
            self._doubts.clear(self._names.map, is_complete=is_complete)

    def _refuse(self, reason: str) -> None:
        """Drop an event that is contradictory or exceeds a limit, and add a doubt."""
        self._counts.refused_events += 1
        self._doubts.add(Doubt.UNREADABLE)
        if len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.append(f"stored event refused: {reason}")

    def _total(self) -> NormalizerCounts:
        """Return the totals of this object and of the parts of this life."""
        counts, engine_map = self._counts, self._names.map
        return msgspec.structs.replace(
            counts,
            given_up=counts.given_up + self._held_back.given_up_blocks,
            unknown_removed=counts.unknown_removed + engine_map.unknown_removals,
            over_removed=counts.over_removed + engine_map.over_removals,
            untold_contexts=counts.untold_contexts + self._names.untold_events,
            uncounted=counts.uncounted + engine_map.uncounted_blocks,
        )

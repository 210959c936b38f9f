"""The blocks that the groups of a hybrid model hold, other than those of full attention.

    stored, removed ─▶ queued ──end of the batch──▶ names ─▶ copies per group ─▶ journal, by class

Events wait for the end of their batch, because full attention names the blocks of a span, and its
event may come later in the batch. A class holds a block if each of its groups has a copy.

Objects of Python stand for blocks here, at about 2 µs and 200 bytes each: an engine keeps few of
these blocks, one window or state for each prompt.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.protocol.hybrid import Layout
from router.protocol.values import HashArray
from router.publisher.engine_events.batch import EngineRemoved, EngineStored, StoredRun
from router.publisher.hybrid.groups import AttentionGroups
from router.publisher.hybrid.placing import BlockNames, placed
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.block_registry import BlockRegistry

ClassPart = EngineStored | StoredRun | EngineRemoved

_TWICE = 2


class SavedClasses(Struct, frozen=True, array_like=True):
    """The blocks of all groups: hashes with copies by group, their names, and doubtful ones."""

    copies: dict[int, dict[int, int]] = {}
    names: dict[int, int] = {}
    doubtful: set[tuple[int, int]] = set()


class ClassBlocks:
    """The copies of one rank's class blocks, the only writer of the journal's classes.

    `unplaced`: engine hashes that are held and have no name. `_doubtful`: groups and hashes whose
    number of copies may be too large, until their removals show that it is not. `layout`: the
    published one; None while all groups are full attention.

    Invariant between batches: the journal holds, in each class, the names of the hashes of which
    every group of the class has a copy.
    """

    __slots__ = (
        "_copies",
        "_doubtful",
        "_groups",
        "_journal",
        "_limit_blocks",
        "_names",
        "_queue",
        "_version",
        "layout",
        "unplaced",
    )

    def __init__(self, journal: SourceJournal, groups: AttentionGroups, limit_blocks: int) -> None:
        self._journal = journal
        self._groups = groups
        self._limit_blocks = limit_blocks
        self._queue: list[ClassPart] = []
        self._copies: dict[int, dict[int, int]] = {}
        self._names = BlockNames()
        self.unplaced: set[int] = set()
        self._doubtful: set[tuple[int, int]] = set()
        self._version = groups.version
        self.layout: Layout | None = None

    @property
    def block_count(self) -> int:
        """The number of copies that are known, of all groups. O(groups)."""
        return sum(len(held) for held in self._copies.values())

    def add(self, part: ClassPart) -> None:
        """Queue a part of a batch that belongs to no group of full attention."""
        self._queue.append(part)

    def settle(self, registry: BlockRegistry) -> int:
        """Apply the queued events, and publish the layout. Returns the number of refused events.

        `registry` names the blocks of full attention. O(blocks queued and unplaced).
        """
        if self._version != self._groups.version:
            self._lay_out()
        if not self._groups.is_hybrid:
            return 0
        queue, self._queue = self._queue, []
        refused = 0
        for part in queue:
            if isinstance(part, EngineRemoved):
                self._remove(part.group, part.block_hashes.tolist())
                continue
            for event in part.events() if isinstance(part, StoredRun) else (part,):
                refused += not self._store(event, registry)
        if self.unplaced:
            self._place_late(registry)
        self._publish_layout()
        return refused

    def clear(self) -> None:
        """Remove all blocks: the engine's cache on the device is empty."""
        self._queue.clear()
        self._copies.clear()
        self._names = BlockNames()
        self.unplaced.clear()
        self._doubtful.clear()
        if self.layout is not None:
            self._journal.classes_cleared()
            self._publish_layout()

    def _store(self, event: EngineStored, registry: BlockRegistry) -> bool:
        """Count and name the blocks of an event. Returns False if the limit is reached."""
        hashes = event.block_hashes.tolist()
        group, held = event.group, self._copies.setdefault(event.group, {})
        is_tail = event.block_size < self._groups[group].block_tokens
        if not hashes or (is_tail and not self._groups.has_inner_hits):
            return True  # a block that is not full does not count
        if self.block_count + len(hashes) > self._limit_blocks:
            return False
        if not self._groups.is_full(group) and any(each in held for each in hashes):
            again = self._reported_again(event, registry)
            self._doubtful.update((group, each) for each in again)
        self._name(event, hashes, registry)
        for each in hashes:
            held[each] = held.get(each, 0) + 1
        self._publish_held(group, hashes)
        return True

    def _name(self, event: EngineStored, hashes: list[int], registry: BlockRegistry) -> None:
        known = self._known(hashes, registry)
        if len(known) < len(hashes):
            ends = registry.ends(event, self._groups.full_groups, self._names.by_hash)
            if ends is not None:
                units = max(event.block_size // self._groups.unit_tokens, 1)
                may_fill = not self._ends_inside(event.group)
                known |= placed(hashes, known, ends[units - 1 :: units], may_fill=may_fill)
        self._names.update(known)
        self.unplaced.update(each for each in hashes if each not in known)

    def _ends_inside(self, group: int) -> bool:
        """Return whether runs of a group's blocks may end elsewhere than full attention's."""
        layout, class_index = self._groups.layout, self._groups.class_of.get(group)
        if layout is None or class_index is None or self._groups.has_inner_hits:
            return True
        return layout.classes[class_index].is_eagle

    def _known(self, hashes: Sequence[int], registry: BlockRegistry) -> dict[int, int]:
        """Return the names of those hashes that any group has named."""
        names = self._names.by_hash
        known = {each: names[each] for each in hashes if each in names}
        missing = [each for each in hashes if each not in known]
        for group in self._groups.full_groups if missing else ():
            found_names, is_named, _ = registry.map.look(np.array(missing, np.uint64), group)
            found = zip(missing, found_names.tolist(), is_named.tolist(), strict=True)
            known |= {each: name for each, name, is_known in found if is_known}
        return known

    def _reported_again(self, event: EngineStored, registry: BlockRegistry) -> list[int]:
        """Return the hashes of an event that may report blocks again, or blocks that are not there.

        An engine asked for full reports lists every block of a hit in every group, and windows
        claim what they lack. It then lists a block at which the rank stood before, after others
        that this group never stored. An engine that computes a prefix again does so because its
        caches did not stand there.
        """
        hashes: list[int] = event.block_hashes.tolist()
        held = self._copies[event.group]
        last = max((place for place, each in enumerate(hashes) if each in held), default=0)
        if all(each in held for each in hashes[: last + 1]):
            return []
        ends = registry.ends(event, self._groups.full_groups, self._names.by_hash)
        name = self._names.by_hash.get(hashes[last])
        if ends is None or name not in ends:
            return []
        is_again = self._is_repeated(hashes[last], registry) and self._stood_at(name, ends)
        return hashes[: last + 1] if is_again else []

    def _is_repeated(self, engine_hash: int, registry: BlockRegistry) -> bool:
        """Return whether every group of full attention has stored a block more than once."""
        one = np.array([engine_hash], np.uint64)
        looks = (registry.map.look(one, group) for group in self._groups.full_groups)
        return all(copies[0] >= _TWICE for _, _, copies in looks)

    def _stood_at(self, name: int, ends: Sequence[int]) -> bool:
        """Return whether every class held what a hit at a block of a span needs.

        Blocks before the span count as held. A block that the engine drops of every hit may be
        computed again, at the begin of a span. O(blocks of the span and of a window).
        """
        layout = self._groups.layout
        assert layout is not None
        end = ends.index(name) + 1
        for index, shape in enumerate(layout.classes):
            units = shape.block_tokens // self._groups.unit_tokens
            if (shape.is_eagle or layout.is_full_eagle) and end <= self._groups.most_units:
                return False
            need = -(-(shape.span_tokens - 1) // shape.block_tokens) if shape.span_tokens else 1
            places = range(end, max(end - need * units, 0), -units)
            wanted = [self._names.hash_of(ends[place - 1]) for place in places]
            for group in self._groups.groups_of(index):
                copies = self._copies.get(group, {})
                if shape.kind != "tail" and not all(each in copies for each in wanted):
                    return False
        return True

    def _remove(self, group: int, hashes: Iterable[int]) -> None:
        held, gone = self._copies.get(group, {}), []
        for each in hashes:
            copies = held.get(each, 0)
            if copies > 1:
                held[each] = copies - 1
            elif copies:
                del held[each]
                self._doubtful.discard((group, each))
                gone.append(each)
        self._withdraw(group, gone)

    def _withdraw(self, group: int, gone: list[int]) -> None:
        """Remove blocks from the class of a group, and forget those that no group holds."""
        class_index = self._groups.class_of.get(group)
        names = [self._names.by_hash[each] for each in gone if each in self._names.by_hash]
        if class_index is not None and names:
            self._journal.class_removed(class_index, self._bus_names(names))
        for each in gone:
            if not any(each in held for held in self._copies.values()):
                self._names.forget((each,))
                self.unplaced.discard(each)

    def _publish_held(self, group: int, hashes: Iterable[int]) -> None:
        """Publish those blocks of a group that have a name and are in each group of its class."""
        class_index = self._groups.class_of.get(group)
        if class_index is None:
            return
        all_held = [self._copies.get(each, {}) for each in self._groups.groups_of(class_index)]
        by_hash = self._names.by_hash
        names = [
            by_hash[each]
            for each in hashes
            if each in by_hash and all(each in held for held in all_held)
        ]
        if names:
            self._journal.class_stored(class_index, self._bus_names(names))

    def _place_late(self, registry: BlockRegistry) -> None:
        """Name blocks whose names are known since, as those of orphans that found parents."""
        known = self._known(list(self.unplaced), registry)
        if known:
            self._names.update(known)
            self.unplaced.difference_update(known)
            for group, held in self._copies.items():
                self._publish_held(group, [each for each in known if each in held])

    def _lay_out(self) -> None:
        """Publish all blocks anew, after the groups or their classes have changed."""
        self._version = self._groups.version
        if self.layout is not None:
            self._journal.classes_cleared()
        self._publish_layout()
        for group in self._copies if self._groups.is_hybrid else ():
            self._publish_held(group, self._copies[group])

    def _publish_layout(self) -> None:
        layout = self._groups.layout
        if layout is not None and not layout.problem:
            problem = ""
            if self._doubtful:
                problem = f"{len(self._doubtful)} blocks may have been reported again"
            elif self.unplaced:
                problem = f"{len(self.unplaced)} blocks of windows or states have no place"
            if problem:
                layout = replace(layout, problem=problem)
        if layout != self.layout:
            self.layout = layout
            self._journal.set_layout(layout)

    def saved(self) -> SavedClasses:
        """Return the state, for `load`. It must be encoded before any other call."""
        return SavedClasses(self._copies, self._names.by_hash, self._doubtful)

    def load(self, saved: SavedClasses) -> None:
        """Restore a state, and publish it. O(blocks)."""
        self._copies = saved.copies
        self._names = BlockNames(saved.names)
        self._doubtful = saved.doubtful
        held = {each for group in self._copies.values() for each in group}
        self.unplaced = {each for each in held if each not in self._names.by_hash}
        self._lay_out()

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        assert not self._queue
        held = {each for group in self._copies.values() for each in group}
        names = self._names.by_hash
        assert names.keys() <= held
        assert {self._names.hash_of(each) for each in names.values()} <= names.keys()
        assert self.unplaced == held - names.keys()
        for index in set(self._groups.class_of.values()):
            groups = [self._copies.get(each, {}) for each in self._groups.groups_of(index)]
            common = set(groups[0]).intersection(*groups[1:])
            placed_names = [names[each] for each in common if each in names]
            assert set(self._bus_names(placed_names).tolist()) == set(
                self._journal.held_in_class(index).tolist()
            )

    def _bus_names(self, names: list[int]) -> HashArray:
        return self._journal.naming.names(np.array(names, np.uint64))

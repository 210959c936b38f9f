"""The groups of an engine's layers, and the classes that they form.

Stored events describe their group; removals only number it, so its description is remembered.
Groups of full attention are published by tier. The others, the groups of a hybrid model, are joined
to classes of equal kind and shape.
"""

from math import lcm

from msgspec import Struct

from router.protocol.hybrid import (
    MAX_CLASSES,
    MAX_GROUPS,
    NO_SETTINGS,
    ClassKind,
    HybridSettings,
    LayerClass,
    Layout,
)
from router.publisher.engine_events.batch import EngineBatch, EngineStored, StoredRun

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_KINDS: dict[str, ClassKind] = {
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "mamba": "state",
    "chunked_local_attention": "chunk",
}


class Group(Struct, frozen=True, array_like=True, gc=False):
    """A group of layers, as its stored events describe it.

    `kind`: None if no event contained it. `block_tokens`: the largest size seen, as the last block
    of a prompt may be smaller; 0 before the first block.
    """

    kind: str | None = None
    block_tokens: int = 0
    window_tokens: int | None = None

    @property
    def is_full(self) -> bool:
        """True for full attention."""
        return self.kind in FULL_ATTENTION


class AttentionGroups:
    """The groups of one engine, and their classes.

    A group without a kind counts as full attention if its number is 0, as in engines that have no
    other groups. `version` counts changes. `unit_tokens`: the identity's block size. `layout`: None
    while all groups are full attention that keeps whole hits. `class_of`: the class of each group
    with a known shape. `has_inner_hits`: hits may end inside blocks, at every hash.
    """

    __slots__ = (
        "_groups",
        "_least_tokens",
        "_settings",
        "class_of",
        "has_inner_hits",
        "layout",
        "unit_tokens",
        "version",
    )

    def __init__(self, unit_tokens: int, settings: HybridSettings = NO_SETTINGS) -> None:
        self.unit_tokens = unit_tokens
        self._settings = settings
        self._groups: dict[int, Group] = {}
        self._least_tokens = unit_tokens
        self.version = 0
        self._lay_out()

    def __getitem__(self, group: int) -> Group:
        return self._groups.get(group, Group())

    @property
    def is_hybrid(self) -> bool:
        """True once a layout is known: hits may end before full attention does."""
        return self.layout is not None

    def is_full(self, group: int) -> bool:
        """Return whether a group is full attention, as far as is known."""
        known = self._groups.get(group)
        if known is None or known.kind is None:
            return group == 0
        return known.is_full

    @property
    def full_groups(self) -> list[int]:
        """The known groups of full attention, or group 0 if there are none."""
        return [each for each in sorted(self._groups) if self.is_full(each)] or [0]

    def groups_of(self, class_index: int) -> list[int]:
        """Return the groups of a class."""
        return [group for group, index in self.class_of.items() if index == class_index]

    def is_tail(self, event: EngineStored) -> bool:
        """Return whether an event is of a block that is not full, in which a hit may end."""
        return self.has_inner_hits and event.block_size < self[event.group].block_tokens

    def units(self, group: int) -> int:
        """Return the number of the identity's blocks in a block of a group, at least 1."""
        return max(self[group].block_tokens // self.unit_tokens, 1)

    def note(self, batch: EngineBatch) -> None:
        """Record the groups that a batch describes. O(parts)."""
        for part in batch.parts:
            event = part.whole if isinstance(part, StoredRun) else part
            if isinstance(event, EngineStored) and (event.group or event.spec_kind is not None):
                self._note(event)

    def _note(self, event: EngineStored) -> None:
        known = self._groups.get(event.group)
        if known is None and len(self._groups) >= MAX_GROUPS:
            return
        group = Group(
            event.spec_kind or (None if known is None else known.kind),
            max(event.block_size, 0 if known is None else known.block_tokens),
            event.sliding_window_tokens or (None if known is None else known.window_tokens),
        )
        if group != known or 0 < event.block_size < self._least_tokens:
            self._least_tokens = min(self._least_tokens, event.block_size or self._least_tokens)
            self._groups[event.group] = group
            self.version += 1
            self._lay_out()

    @property
    def most_units(self) -> int:
        """The number of the identity's blocks in the largest block of a group."""
        return max(map(self.units, self._groups), default=1)

    def listed(self) -> dict[int, Group]:
        """Return the known groups."""
        return self._groups

    def load(self, groups: dict[int, Group]) -> None:
        """Replace all groups by a list."""
        self._groups = groups
        self.version += 1
        self._lay_out()

    def _lay_out(self) -> None:
        """Derive the classes and the layout from the groups.

        A model of full attention alone has a layout only if its engine drops a block of each hit.
        """
        others = [each for each in sorted(self._groups) if not self.is_full(each)]
        full = [each for each in sorted(self._groups) if self.is_full(each)]
        is_full_eagle = any(each in self._settings.eagle_groups for each in full)
        self.class_of: dict[int, int] = {}
        self.layout: Layout | None = None
        self.has_inner_hits = self._hits_end_inside(others)
        if not others and not is_full_eagle:
            return
        classes: list[LayerClass] = []
        for group in others:
            shape = self._class(group)
            if shape is not None and shape not in classes and len(classes) < MAX_CLASSES:
                classes.append(shape)
            if shape in classes:
                self.class_of[group] = classes.index(shape)
        if self.has_inner_hits and len(classes) < MAX_CLASSES:
            self.class_of |= dict.fromkeys(full, len(classes))
            classes.append(LayerClass("tail", self.unit_tokens))
        full_block_tokens = max((self[each].block_tokens for each in full), default=0)
        alignment_tokens = self._block_alignment()
        if self.has_inner_hits:
            alignment_tokens = self.unit_tokens
        self.layout = Layout(
            alignment_tokens,
            full_block_tokens,
            tuple(classes),
            is_full_eagle,
            self._problem(full, others),
        )

    def _block_alignment(self) -> int:
        """Return the multiple of which hits are that end with blocks of every group."""
        sizes = [each.block_tokens for each in self._groups.values() if each.block_tokens]
        return lcm(*sizes, *self._settings.silent_block_sizes) if sizes else self.unit_tokens

    def _hits_end_inside(self, others: list[int]) -> bool:
        """Return whether hits may end inside blocks, at every hash.

        They do if a state's blocks are larger than the tokens of a hash, and those of windows and
        chunks are not.
        """
        states = [self[each] for each in others if self[each].kind == "mamba"]
        rest = [self[each] for each in others if self[each].kind != "mamba"]
        unit = min(self.unit_tokens, self._least_tokens)
        has_larger_states = any(each.block_tokens > unit for each in states)
        return has_larger_states and all(each.block_tokens == unit for each in rest)

    def _class(self, number: int) -> LayerClass | None:
        """Return the class of a group. Returns None if its shape is not known."""
        group = self[number]
        kind = _KINDS.get(group.kind or "")
        is_eagle = number in self._settings.eagle_groups
        if kind is None or not group.block_tokens or group.block_tokens % self.unit_tokens:
            return None
        if kind == "state":
            tokens = self.unit_tokens if self.has_inner_hits else group.block_tokens
            return LayerClass(kind, tokens, 0, is_eagle)
        span = group.window_tokens if kind == "window" else self._settings.chunk_tokens
        return LayerClass(kind, group.block_tokens, span, is_eagle) if span else None

    def _problem(self, full: list[int], others: list[int]) -> str:
        """Return the first condition of exactness that the groups fail; empty if none."""
        if not full:
            return "no group has full attention"
        problems = [*map(self._size_problem, (*full, *others)), *map(self._shape_problem, others)]
        if any(problems):
            return next(filter(None, problems))
        if len({self._class(each) for each in others}) > MAX_CLASSES:
            return f"more than {MAX_CLASSES} classes of layers"
        if len({self[each].block_tokens for each in full}) > 1:
            return "groups of full attention have different block sizes"
        if self._least_tokens < self.unit_tokens:
            return f"hashes are of {self._least_tokens} tokens, registered {self.unit_tokens}"
        return ""

    def _size_problem(self, number: int) -> str | None:
        """Return why the block size of a group can not be used. Returns None if it can."""
        tokens = self[number].block_tokens
        if not tokens:
            return f"the block size of group {number} is not known yet"
        if tokens % self.unit_tokens:
            return f"group {number} has blocks of {tokens} tokens, registered {self.unit_tokens}"
        return None

    def _shape_problem(self, number: int) -> str | None:
        """Return why the shape of a group is not known. Returns None if it is."""
        group = self[number]
        kind = _KINDS.get(group.kind or "")
        if kind is None:
            return f"kind {group.kind or 'unknown'!s} of group {number} is not known"
        if kind == "window" and not group.window_tokens:
            return f"the window of group {number} is not known"
        if kind == "chunk" and not self._settings.chunk_tokens:
            return "chunk_tokens is not registered"
        return None

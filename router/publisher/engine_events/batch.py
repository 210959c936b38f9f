"""Events of engines about their caches, in one form for all engines."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.protocol.values import HashArray, Tier
from router.sequence.hashing.block_hashes import TokenArray

ExtraKeys: TypeAlias = tuple[tuple[object, ...] | None, ...]
"""The keys of each block beyond its tokens, as the engine sent them."""


class EngineStored(Struct, frozen=True, eq=False, gc=False):
    """Consecutive blocks that are now in a medium.

    Hashes are the engine's own, as u64: signed ones reinterpreted bit by bit, those of 32 bytes
    replaced by their XXH3-64. `parent` has the same form; None: the first block begins a prompt.
    Arrays are views of the batch's arrays.
    """

    block_hashes: HashArray
    parent: int | None
    tokens: TokenArray
    block_size: int
    """In tokens; 0 in a placeholder, which has no tokens."""
    medium: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    extra_keys: ExtraKeys | None = None
    """None also if no block has any."""
    group: int = 0
    spec_kind: str | None = None
    sliding_window_tokens: int | None = None
    is_eagle: bool = False
    """True if tokens came as pairs, [a, b], [b, c]. Here they are a, b, c: one extra token."""
    locality: str | None = None
    local_hashes: HashArray | None = None
    """The local hash of each block, from publishers that send these in place of tokens."""


class StoredRun(Struct, frozen=True, eq=False, gc=False):
    """Consecutive stored events, merged into one.

    They differ only in their blocks, tokens and parents, have the same number of tokens in excess
    of their blocks, and contain no context and no local hashes of their blocks.

    Engines publish an event for each request, with a few blocks each. An object and a call for
    every event would take several times as long as its blocks.
    """

    whole: EngineStored
    """All blocks as one event; the parent is the first event's."""
    heads: HashArray
    """Three words for each event: the index of its first block, its parent, and 1 if it has one."""

    def __len__(self) -> int:
        return len(self.heads) // 3

    def blocks_of(self, events: int) -> int:
        """Return the number of blocks in the first `events` events."""
        blocks = len(self.whole.block_hashes)
        return int(self.heads[3 * events]) if events < len(self) else blocks

    def events(self, first: int = 0) -> Iterator[EngineStored]:
        """Yield the events one by one, from index `first` on."""
        for place in range(first, len(self)):
            yield self.part(place, place + 1).whole

    def part(self, first: int, last: int) -> "StoredRun":
        """Return the events from index `first` to `last`, which is excluded."""
        whole, heads = self.whole, self.heads[3 * first : 3 * last].copy()
        more = (len(whole.tokens) - self.blocks_of(len(self)) * whole.block_size) // len(self)
        start, end = self.blocks_of(first), self.blocks_of(last)
        heads[::3] -= np.uint64(start)
        _, parent, has_parent = heads[:3].tolist()
        token, last_token = (
            blocks * whole.block_size + events * more
            for blocks, events in ((start, first), (end, last))
        )
        part = replace(
            whole,
            block_hashes=whole.block_hashes[start:end],
            parent=parent if has_parent else None,
            tokens=whole.tokens[token:last_token],
        )
        return StoredRun(part, heads)


class EngineRemoved(Struct, frozen=True, eq=False, gc=False):
    """Blocks that are no longer in a medium; each hash stands for one copy.

    Consecutive removals that differ in nothing but their hashes are merged into one.
    """

    block_hashes: HashArray
    medium: str | None
    group: int = 0
    locality: str | None = None


class EngineCleared(Struct, frozen=True, gc=False):
    """A removal of all blocks of one tier; None: of all that the engine's settings say."""

    tier: Tier | None = None


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared
EnginePart: TypeAlias = EngineEvent | StoredRun


class EngineBatch(Struct, frozen=True, eq=False):
    """Events of one rank, in order, and descriptions of the dropped ones."""

    dp_rank: int | None
    parts: list[EnginePart]
    unknown: list[str]
    """The types of dropped events that are unknown to this version, one for each event."""
    malformed: list[str]
    """A sentence for each event that could not be read."""
    unknown_field: str | None = None
    """A sentence that names the first field that this version does not know, and that may change
    what the blocks of its event are. None if there is no such field."""
    has_full_only: bool = False
    """The events show that the model is hybrid, but not where a prompt can be resumed."""

    @property
    def events(self) -> list[EngineEvent]:
        """The events one by one. O(events)."""
        singles: list[EngineEvent] = []
        for part in self.parts:
            singles += part.events() if isinstance(part, StoredRun) else (part,)
        return singles

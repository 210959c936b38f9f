"""What engines say about their caches, whichever they are and however they say it."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.protocol.values import HashArray
from router.sequence.hashing import TokenArray

ExtraKeys: TypeAlias = tuple[tuple[object, ...] | None, ...]
"""What beside its tokens makes each block what it is, as the engine sent it."""


class EngineStored(Struct, frozen=True, eq=False, gc=False):
    """Consecutive blocks are now in a medium.

    Hashes are the engine's own names as u64: signed ones bit by bit, of those of 32 bytes their
    XXH3-64. `parent` is named in the same way; None: the first block begins a prompt. Arrays are
    views into what the whole batch shares.
    """

    block_hashes: HashArray
    parent: int | None
    tokens: TokenArray
    block_size: int
    """Tokens; 0 in a placeholder, which has none."""
    medium: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    extra_keys: ExtraKeys | None = None
    """None also where no block has any."""
    group: int = 0
    spec_kind: str | None = None
    sliding_window_tokens: int | None = None
    is_eagle: bool = False
    """Tokens came as pairs, [a, b], [b, c]: here they are a, b, c, one more than the blocks'."""
    locality: str | None = None


class StoredRun(Struct, frozen=True, eq=False, gc=False):
    """Consecutive stored events, joined: they differ only in their blocks, tokens and parents, have
    equally many tokens more than their blocks need, and say nothing else of what blocks are.

    Engines tell of each request by itself, a few blocks at a time: an object and a call for every
    event would take several times as long as its blocks do.
    """

    whole: EngineStored
    """As if they were one; the parent is the first one's."""
    heads: HashArray
    """Three words an event: its first block, its parent, and 1 if it has one."""

    def __len__(self) -> int:
        return len(self.heads) // 3

    def blocks_of(self, events: int) -> int:
        """How many blocks the first of its events have."""
        blocks = len(self.whole.block_hashes)
        return int(self.heads[3 * events]) if events < len(self) else blocks

    def events(self, first: int = 0) -> Iterator[EngineStored]:
        """The events one by one, from one of them on."""
        for place in range(first, len(self)):
            yield self.part(place, place + 1).whole

    def part(self, first: int, last: int) -> "StoredRun":
        """The events from one of them on, up to another."""
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
    """Blocks are no longer in a medium; each hash stands for one copy.

    Consecutive removals that differ in nothing else are joined into one.
    """

    block_hashes: HashArray
    medium: str | None
    group: int = 0
    locality: str | None = None


class EngineCleared(Struct, frozen=True, gc=False):
    """The engine has forgotten every block."""


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared
EnginePart: TypeAlias = EngineEvent | StoredRun


class EngineBatch(Struct, frozen=True, eq=False):
    """Events of one rank, in order, and what was dropped from among them."""

    dp_rank: int | None
    parts: list[EnginePart]
    unknown: list[str]
    """Types this version does not know, one an event."""
    malformed: list[str]
    """One sentence an event that could not be read."""

    @property
    def events(self) -> list[EngineEvent]:
        """The events one by one, for who looks at each. O(events)."""
        singles: list[EngineEvent] = []
        for part in self.parts:
            singles += part.events() if isinstance(part, StoredRun) else (part,)
        return singles

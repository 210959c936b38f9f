"""The feed of a journal's source from a block manager's messages."""

from collections.abc import Sequence

import numpy as np

from router.errors import WireError
from router.protocol.events import REMOVED, STORED
from router.protocol.values import SCHEME, TIERS, HashArray, Identity, Tier
from router.publisher.feed.tier_wire import (
    VERSION,
    Held,
    Hello,
    Message,
    Paths,
    TierEvents,
    unpacked,
)
from router.publisher.journal.consolidator import SourceView

MAX_BLOCKS = 3 << 23
"""The limit of blocks over all tiers; the same as of an engine's known blocks."""


class TierFeed:
    """The feeder of one rank's source, its only writer.

    Between two connections the source keeps its blocks. `is_current`: the blocks are those of a
    complete snapshot of this connection.
    """

    __slots__ = ("_coming", "_is_greeted", "_source", "dp_rank", "is_current", "snapshots")

    def __init__(self, source: SourceView, dp_rank: int) -> None:
        self._source = source
        self.dp_rank = dp_rank
        self.snapshots = 0
        self.begin()

    @property
    def held_blocks(self) -> int:
        """The number of held blocks, each counted once per tier."""
        return sum(self._source.state.counts)

    def begin(self) -> None:
        """Start a new connection."""
        self._is_greeted = self.is_current = False
        self._coming: list[list[HashArray]] = [[] for _ in range(TIERS)]

    def take(self, message: Message) -> bool:
        """Apply the next message. Returns whether it proves that nothing else was pending.

        Raises WireError for an invalid message; the connection is then unusable. O(blocks).
        """
        match message:
            case Hello():
                self._greet(message)
            case Held(tier, paths):
                self._check(not self.is_current)
                self._coming[tier].append(self._store(tier, paths))
            case TierEvents(events):
                self._check(True)
                self._end_snapshot()
                for event in events:
                    self._apply(event.kind, event.tier, event.paths)
                return message.is_all
        return False

    def forget(self) -> None:
        """Drop all blocks, because the manager's state is unknown."""
        self._source.cleared()
        self.begin()

    def _greet(self, hello: Hello) -> None:
        identity, expected = hello.identity, self._source.identity
        if hello.version != VERSION:
            raise WireError(f"version {hello.version} of its messages (allowed: {VERSION})")
        wanted = Identity(SCHEME, expected.block_size, expected.eagle)
        if identity != wanted:
            raise WireError(f"its blocks are {_shown(identity)}, the engine's {_shown(wanted)}")
        if hello.dp_rank != self.dp_rank:
            raise WireError(f"it is of rank {hello.dp_rank}, expected rank {self.dp_rank}")
        self.begin()
        self._is_greeted = True

    def _check(self, is_in_turn: bool) -> None:
        if not (self._is_greeted and is_in_turn):
            raise WireError("an unexpected message")

    def _store(self, tier: Tier, paths: Paths) -> HashArray:
        """Store blocks in a tier. Returns their bus names."""
        hashes, heads = unpacked(paths)
        if len(hashes) and not len(heads):
            raise WireError("blocks without heads")
        if self.held_blocks + len(hashes) > MAX_BLOCKS:
            raise WireError(f"it holds more than {MAX_BLOCKS} blocks")
        naming = self._source.naming
        names = naming.names(hashes)
        self._source.stored_paths(tier, names, naming.heads(heads))
        return names

    def _apply(self, kind: int, tier: Tier, paths: Paths) -> None:
        if kind == STORED:
            self._store(tier, paths)
        elif kind == REMOVED:
            self._source.removed(tier, self._source.naming.names(unpacked(paths)[0]))
        else:
            self._source.cleared(tier)

    def _end_snapshot(self) -> None:
        """Remove the blocks that the snapshot does not contain."""
        if self.is_current:
            return
        for tier in Tier:
            held = self._source.held(tier)
            self._source.removed(tier, _without(held, self._coming[tier]))
        self._coming = [[] for _ in range(TIERS)]
        self.is_current = True
        self.snapshots += 1


def _without(held: HashArray, reported: Sequence[HashArray]) -> HashArray:
    """Return the held blocks that are not in `reported`. O(n log n): hashing would be slower."""
    known = np.sort(np.concatenate([np.empty(0, np.uint64), *reported]))
    if not len(known):
        return held
    nearest = np.take(known, np.searchsorted(known, held), mode="clip")
    gone: HashArray = held[nearest != held]
    return gone


def _shown(identity: Identity) -> str:
    pairs = ", of pairs" if identity.eagle else ""
    return f"of {identity.block_size} tokens by {identity.scheme}{pairs}"

"""From a block manager's messages to what its source holds."""

from collections.abc import Sequence

import numpy as np

from router.errors import WireError
from router.protocol.events import REMOVED, STORED
from router.protocol.values import SCHEME, TIERS, HashArray, Identity, Tier
from router.publisher.consolidated import OneSource
from router.publisher.tier_wire import (
    VERSION,
    Held,
    Hello,
    Message,
    News,
    Paths,
    unpacked,
)

MAX_BLOCKS = 3 << 23
"""Of all tiers; as many as an engine may have known."""


class TierFeed:
    """Feeder of one rank's source; nobody else writes to it.

    Between two connections the source holds what it was told last. `is_current`: what is held was
    told in this connection.
    """

    __slots__ = ("_coming", "_is_greeted", "_source", "dp_rank", "is_current", "snapshots")

    def __init__(self, source: OneSource, dp_rank: int) -> None:
        self._source = source
        self.dp_rank = dp_rank
        self.snapshots = 0
        self.begin()

    @property
    def held_blocks(self) -> int:
        """Once per tier."""
        return sum(self._source.state.counts)

    def begin(self) -> None:
        """A new connection."""
        self._is_greeted = self.is_current = False
        self._coming: list[list[HashArray]] = [[] for _ in range(TIERS)]

    def take(self, message: Message) -> bool:
        """Carry out the next message; does it prove that there was no more?

        Raises WireError for one that cannot be: the connection is of no more use. O(blocks).
        """
        match message:
            case Hello():
                self._greet(message)
            case Held(tier, paths):
                self._check(not self.is_current)
                self._coming[tier].append(self._store(tier, paths))
            case News(events):
                self._check(True)
                self._end_snapshot()
                for event in events:
                    self._apply(event.kind, event.tier, event.paths)
                return message.is_all
        return False

    def forget(self) -> None:
        """Nothing is known of the manager: it may hold nothing."""
        self._source.cleared()
        self.begin()

    def _greet(self, hello: Hello) -> None:
        identity, expected = hello.identity, self._source.identity
        if hello.version != VERSION:
            raise WireError(f"version {hello.version} of its news (allowed: {VERSION})")
        wanted = Identity(SCHEME, expected.block_size, expected.eagle)
        if identity != wanted:
            raise WireError(f"its blocks are {_shown(identity)}, the engine's {_shown(wanted)}")
        if hello.dp_rank != self.dp_rank:
            raise WireError(f"it is of rank {hello.dp_rank}, asked for rank {self.dp_rank}")
        self.begin()
        self._is_greeted = True

    def _check(self, is_in_turn: bool) -> None:
        if not (self._is_greeted and is_in_turn):
            raise WireError("a message out of turn")

    def _store(self, tier: Tier, paths: Paths) -> HashArray:
        """Bus names of what is held now."""
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
        """What the manager did not speak of it does not hold any more."""
        if self.is_current:
            return
        for tier in Tier:
            held = self._source.held(tier)
            self._source.removed(tier, _without(held, self._coming[tier]))
        self._coming = [[] for _ in range(TIERS)]
        self.is_current = True
        self.snapshots += 1


def _without(held: HashArray, told: Sequence[HashArray]) -> HashArray:
    """Those of the held that nobody told of. O(n log n), without hashing, which is slower."""
    known = np.sort(np.concatenate([np.empty(0, np.uint64), *told]))
    if not len(known):
        return held
    nearest = np.take(known, np.searchsorted(known, held), mode="clip")
    gone: HashArray = held[nearest != held]
    return gone


def _shown(identity: Identity) -> str:
    pairs = ", of pairs" if identity.eagle else ""
    return f"of {identity.block_size} tokens by {identity.scheme}{pairs}"

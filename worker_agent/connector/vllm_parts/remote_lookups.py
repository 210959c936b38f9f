"""Lookups of prompts in the store that the workers share, and at other engines, by the workers.

What is there is unknown without a lookup. A prompt waits for the result for at most `LOOK_S`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count

from msgspec import Struct

from router.protocol.values import Rank
from worker_agent.blocks.names import BlockName
from worker_agent.connector.vllm_parts.messages import Looked, Lookup

LOOK_S = 1.0
"""Longest time that a prompt waits for a lookup."""
MAX_BLOCKS = 4096
"""Limit of blocks in a lookup; of a longer prompt, only these leading ones are looked up."""


class _Asked(Struct):
    """A lookup. `at_peer`: the places found by all workers so far; None before the first."""

    names: tuple[BlockName, ...]
    until_s: float
    missing_ranks: set[int]
    at_peer: set[int] | None = None


class RemoteLookups:
    """The lookups of present requests, at most one each. All calls are O(ranks), or O(blocks).

    Invariant: `_at_peers` counts, for each block, the lookups of present requests that found it at
    the peers of all ranks.
    """

    __slots__ = ("_asked", "_at_peers", "_count", "_found", "_numbers", "_queued", "_ranks", "late")

    def __init__(self, num_ranks: int) -> None:
        self.late = 0
        """Number of lookups that did not end in time."""
        self._count = count(1)
        self._ranks = range(num_ranks)
        self._asked: dict[int, _Asked] = {}
        self._at_peers: Counter[bytes] = Counter()
        self._found: dict[int, list[bytes]] = {}
        self._numbers: dict[str, int] = {}
        self._queued: list[Lookup] = []

    def __contains__(self, key: str) -> bool:
        """Return whether this prompt's lookup was started."""
        return key in self._numbers

    def is_at_peers(self, identity: bytes) -> bool:
        """Return whether every worker has found its part of the block at a peer."""
        return identity in self._at_peers

    def look_up(
        self, key: str, names: Sequence[BlockName], now_s: float, source: Rank | None = None
    ) -> bool:
        """Return whether to wait for the lookup of a prompt; the first call starts it.

        `source`: the rank that is said to have these blocks. Returns False once all workers have
        responded, or the time limit has passed.
        """
        if key in self._numbers:
            return self._is_open(self._numbers[key], now_s)
        number = self._numbers[key] = next(self._count)
        asked = tuple(names[:MAX_BLOCKS])
        self._asked[number] = _Asked(asked, now_s + LOOK_S, set(self._ranks))
        self._queued.append(Lookup(number, asked, source))
        return True

    def take(self) -> list[Lookup]:
        """Return the lookups to send to the workers."""
        queued, self._queued = self._queued, []
        return queued

    def answered(self, rank: int, looked: Sequence[Looked]) -> None:
        """Record that a worker has finished lookups."""
        for each in looked:
            asked = self._asked.get(each.number)
            if asked is None or rank not in asked.missing_ranks:
                continue
            asked.missing_ranks.discard(rank)
            found = set(each.at_peer).intersection(range(len(asked.names)))
            asked.at_peer = found if asked.at_peer is None else asked.at_peer & found
            if not asked.missing_ranks:
                identities = [asked.names[place].identity for place in asked.at_peer]
                self._found[each.number] = identities
                self._at_peers.update(identities)

    def forget(self, key: str) -> None:
        """Forget the lookup of a request; a later call may start a new one."""
        number = self._numbers.pop(key, None)
        if number is None:
            return
        self._asked.pop(number, None)
        for identity in self._found.pop(number, ()):
            self._at_peers[identity] -= 1
            if not self._at_peers[identity]:
                del self._at_peers[identity]

    def _is_open(self, number: int, now_s: float) -> bool:
        asked = self._asked.get(number)
        if asked is None:
            return False
        if asked.missing_ranks and now_s < asked.until_s:
            return True
        self.late += bool(asked.missing_ranks)
        del self._asked[number]
        return False

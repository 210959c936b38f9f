"""The prefixes most often found in caches, counted in bounded memory (Space-Saving).

A prompt with 37 leading blocks held anywhere counts for its prefixes of 1, 2, 3, 4, 6, 8, 12, 16,
24, 32 and 37 blocks, so that prompts with different continuations share the counters of their
common prefix. A counter that replaces the rarest prefix starts with its count: no count is too low,
and none is too high by more than its `excess`.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.protocol.values import HashArray, Scope

CAPACITY = 512
SAME_SHARE = 0.8
"""The share of prompts with a longer common prefix at which only the longer one is shown."""


class HotPrefix(Struct, frozen=True):
    """A prefix, identified by the public sequence hash of its last block, in hexadecimal.

    Hexadecimal, because 64-bit numbers are not safe in JSON. At least `count - excess` sampled
    decisions found it, at most `count`. `within`: the longest other prefix shown that it begins
    with, if any.
    """

    model_name: str
    routing_group: str
    sequence_hash: str
    blocks: int
    tokens: int
    count: int
    excess: int
    within: str | None


class _Counter:
    __slots__ = ("blocks", "count", "excess", "parent", "tokens")

    def __init__(
        self, blocks: int, tokens: int, parent: "tuple[Scope, int] | None", excess: int
    ) -> None:
        self.blocks, self.tokens, self.parent = blocks, tokens, parent
        self.count = self.excess = excess


class HotPrefixes:
    """Counters of at most `capacity` prefixes; `decisions` is the number of prompts counted."""

    __slots__ = ("_capacity", "_counters", "decisions")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._counters: dict[tuple[Scope, int], _Counter] = {}
        self.decisions = 0

    def __len__(self) -> int:
        return len(self._counters)

    def note(self, scope: Scope, hashes: HashArray, matched_blocks: int, block_size: int) -> None:
        """Count a prompt with `matched_blocks` leading blocks held anywhere.

        `hashes`: the public hashes of its blocks. O(log(blocks)), and O(capacity) for each new
        prefix.
        """
        self.decisions += 1
        parent: tuple[Scope, int] | None = None
        for blocks in depths(min(matched_blocks, len(hashes))):
            key = (scope, int(hashes[blocks - 1]))
            counter = self._counters.get(key)
            if counter is None:
                excess = self._make_room()
                counter = _Counter(blocks, blocks * block_size, parent, excess)
                self._counters[key] = counter
            counter.count += 1
            parent = key

    def fade(self) -> None:
        """Halve all counts, and drop counters that reach zero. O(capacity)."""
        self.decisions //= 2
        for counter in self._counters.values():
            counter.count //= 2
            counter.excess //= 2
        self._counters = {key: each for key, each in self._counters.items() if each.count}

    def top(self, most: int) -> list[HotPrefix]:
        """Return the prefixes that save most tokens, each as long as it is shared."""
        children: dict[tuple[Scope, int], int] = {}
        for each in self._counters.values():
            if each.parent is not None:
                children[each.parent] = max(children.get(each.parent, 0), each.count)
        shown = [
            (key, each)
            for key, each in self._counters.items()
            if each.count > 1 and children.get(key, 0) < SAME_SHARE * each.count
        ]
        shown.sort(key=lambda item: (-item[1].count * item[1].tokens, item[0]))
        shown = shown[:most]
        names = {key for key, _ in shown}
        return [
            HotPrefix(
                scope.model_name,
                scope.routing_group,
                f"{sequence_hash:016x}",
                each.blocks,
                each.tokens,
                each.count,
                each.excess,
                self._within(each, names),
            )
            for (scope, sequence_hash), each in shown
        ]

    def _within(self, counter: _Counter, names: set[tuple[Scope, int]]) -> str | None:
        """Return the longest of the named prefixes that another one begins with, if any."""
        parent = counter.parent
        while parent is not None and parent not in names:
            before = self._counters.get(parent)
            parent = None if before is None else before.parent
        return None if parent is None else f"{parent[1]:016x}"

    def _make_room(self) -> int:
        """Drop the rarest counter if all are in use; return its count, else 0. O(capacity)."""
        if len(self._counters) < self._capacity:
            return 0
        rarest = min(self._counters, key=lambda key: self._counters[key].count)
        return self._counters.pop(rarest).count


def depths(matched_blocks: int) -> Sequence[int]:
    """Return the prefix lengths a match counts for: 2ⁿ, 3 · 2ⁿ, and the match itself."""
    lengths = {matched_blocks} if matched_blocks else set()
    power = 1
    while power < matched_blocks:
        lengths.add(power)
        if 3 * power < 2 * matched_blocks and power > 1:
            lengths.add(3 * power // 2)
        power *= 2
    return sorted(lengths)

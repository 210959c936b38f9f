"""Recent use counts of blocks. Source: Dynamo's `frequencies` (1.0.2)."""

from collections import Counter, deque

from msgspec import Struct

from router.protocol.values import HashArray


class _Match(Struct):
    """One matched prefix; each of its blocks counts as one use."""

    used_s: float
    sequence_hashes: HashArray


class UseCounts:
    """Uses of every block within the window; at most `max_uses` are kept.

    The clock never goes back, so matches are kept in the order they leave the window.
    Invariants: the counts are those of the blocks in the matches kept, none of them 0; there are
    at most `max_uses` of these blocks; no match is kept without blocks.
    """

    __slots__ = ("_counts", "_matches", "_max_uses", "_uses", "_window_s", "forgotten_uses")

    def __init__(self, window_s: float, max_uses: int) -> None:
        self._window_s = window_s
        self._max_uses = max_uses
        self._matches: deque[_Match] = deque()
        self._counts: Counter[int] = Counter()
        self._uses = 0
        self.forgotten_uses = 0

    def note(self, sequence_hashes: HashArray, now_s: float) -> list[int]:
        """Count a use of a matched prefix; return earlier use counts of its blocks, without zeros.

        A use exactly one window ago still counts, as in the source. Over the limit the oldest uses
        are dropped, the deepest of a prefix first, so that counts never rise along a prompt.
        Amortised O(blocks).
        """
        self._leave_window(now_s)
        hashes = sequence_hashes.tolist()
        frequencies = [uses for h in hashes if (uses := self._counts.get(h, 0))]
        if hashes:
            self._counts.update(hashes)
            self._uses += len(hashes)
            self._matches.append(_Match(now_s, sequence_hashes.copy()))
            self._keep_limit()
        return frequencies

    def use_count(self) -> int:
        """Return the number of uses kept, including those that the next `note` drops. O(1)."""
        return self._uses

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(uses kept)."""
        kept = [match.sequence_hashes.tolist() for match in self._matches]
        assert all(kept)
        assert dict(self._counts) == dict(Counter(h for hashes in kept for h in hashes))
        assert self._uses == sum(map(len, kept)) <= self._max_uses

    def _leave_window(self, now_s: float) -> None:
        while self._matches and now_s - self._matches[0].used_s > self._window_s:
            self._cut_oldest(0)

    def _keep_limit(self) -> None:
        while self._uses > self._max_uses:
            excess = self._uses - self._max_uses
            kept = max(0, len(self._matches[0].sequence_hashes) - excess)
            self.forgotten_uses += self._cut_oldest(kept)

    def _cut_oldest(self, kept_blocks: int) -> int:
        """Cut the oldest match to its first `kept_blocks` blocks. Returns the uses dropped."""
        oldest = self._matches[0]
        cut = oldest.sequence_hashes[kept_blocks:].tolist()
        oldest.sequence_hashes = oldest.sequence_hashes[:kept_blocks]
        if not kept_blocks:
            self._matches.popleft()
        for sequence_hash in cut:
            uses = self._counts.pop(sequence_hash) - 1
            if uses:
                self._counts[sequence_hash] = uses
        self._uses -= len(cut)
        return len(cut)

"""Work that arrived in a sliding window, and in the windows before it.

Time is divided into buckets, six a window. The sliding window has the present bucket, the five
before it, and of the sixth the part that is still within the window: a constant rate is shown
exactly, whenever it is read.
"""

import numpy as np

from router.scheduler.terms import FloatArray

REQUESTS, TOKENS, CONTEXTS, ISL_TOKENS, EXPECTED_TOKENS, EXPECTING = 0, 1, 2, 3, 4, 5
"""Requests that arrived, the prompt tokens to compute for them and their attention work, their
whole prompts, and the output that callers expect, of those that expect one; as the tracker has it.
"""

HELD_BLOCKS, HELD_REQUESTS = 6, 7
"""Blocks of running requests, and these requests, summed over samples: only their ratio counts."""

WORK_COLUMNS = 8

BUCKETS = 6
"""Buckets of a window."""

WINDOWS = 6
"""Windows that are kept, the present one included."""

_KEPT = BUCKETS * WINDOWS + 1


class Arrivals:
    """The work that arrived at one pool of ranks, by bucket. Time never goes back."""

    __slots__ = ("_bucket", "_buckets", "_since_s", "_width_s", "window_s")

    def __init__(self, window_s: float, now_s: float) -> None:
        self.window_s = window_s
        self._width_s = window_s / BUCKETS
        self._buckets: FloatArray = np.zeros((_KEPT, WORK_COLUMNS))
        self._since_s = now_s
        self._bucket = self._bucket_at(now_s)

    def add(self, work: FloatArray, now_s: float) -> None:
        """Add work that arrived just now."""
        self._advance(now_s)
        self._buckets[self._bucket % _KEPT] += work

    def recent(self, now_s: float) -> tuple[FloatArray, float]:
        """Return the work in the window that ends now, and its length in seconds.

        A window that would begin before the first observation begins there, and is a bucket long at
        least.
        """
        self._advance(now_s)
        older = self._bucket - BUCKETS
        part = 1.0 - (now_s / self._width_s - self._bucket)
        work = self._sum(older + 1, self._bucket) + part * self._buckets[older % _KEPT]
        length_s = min(max(now_s - self._since_s, self._width_s), self.window_s)
        return work, length_s

    def is_whole(self, now_s: float) -> bool:
        """Return whether a whole window has been observed."""
        return now_s - self._since_s >= self.window_s

    def earlier(self, now_s: float) -> FloatArray:
        """Return the work of each whole window, one per bucket, that ended before this bucket."""
        self._advance(now_s)
        first = max(self._bucket - _KEPT + 1, self._bucket_at(self._since_s) + 1)
        windows = [
            self._sum(start, start + BUCKETS - 1)
            for start in range(first, self._bucket - BUCKETS + 1)
        ]
        return np.array(windows).reshape(-1, WORK_COLUMNS)

    def _sum(self, first: int, last: int) -> FloatArray:
        work: FloatArray = self._buckets[np.arange(first, last + 1) % _KEPT].sum(axis=0)
        return work

    def _advance(self, now_s: float) -> None:
        """Clear the buckets that begin since the last call."""
        bucket = self._bucket_at(now_s)
        if bucket > self._bucket:
            begun = np.arange(max(self._bucket + 1, bucket - _KEPT + 1), bucket + 1)
            self._buckets[begun % _KEPT] = 0.0
            self._bucket = bucket

    def _bucket_at(self, now_s: float) -> int:
        return int(now_s // self._width_s)

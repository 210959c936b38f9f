"""Rate-limited warnings."""

from collections.abc import Sequence


class LogLimiter:
    """The warnings of one rank: at most `at_most` texts per interval, and the number suppressed."""

    __slots__ = ("_at_most", "_interval_s", "_reported_s", "_sentences", "_suppressed")

    def __init__(self, interval_s: float = 5.0, at_most: int = 8) -> None:
        self._interval_s = interval_s
        self._at_most = at_most
        self._sentences: list[str] = []
        self._suppressed = 0
        self._reported_s = float("-inf")

    def add(self, sentence: str) -> None:
        """Add a warning."""
        if len(self._sentences) < self._at_most:
            self._sentences.append(sentence)
        else:
            self._suppressed += 1

    def take(self, now_s: float) -> Sequence[str]:
        """Return the warnings to log now; empty before the interval is over."""
        if not self._sentences or now_s < self._reported_s + self._interval_s:
            return ()
        sentences = self._sentences
        if self._suppressed:
            sentences.append(f"and {self._suppressed} more like these")
        self._sentences, self._suppressed = [], 0
        self._reported_s = now_s
        return sentences

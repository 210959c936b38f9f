"""Sentences for the log, so few that nobody is flooded."""

from collections.abc import Sequence


class Complaints:
    """Sentences of one rank: each interval the first few are told, and how many more there were."""

    __slots__ = ("_at_most", "_interval_s", "_sentences", "_suppressed", "_told_s")

    def __init__(self, interval_s: float = 5.0, at_most: int = 8) -> None:
        self._interval_s = interval_s
        self._at_most = at_most
        self._sentences: list[str] = []
        self._suppressed = 0
        self._told_s = float("-inf")

    def add(self, sentence: str) -> None:
        """Complain."""
        if len(self._sentences) < self._at_most:
            self._sentences.append(sentence)
        else:
            self._suppressed += 1

    def take(self, now_s: float) -> Sequence[str]:
        """What is to be told now; nothing before the interval is over."""
        if not self._sentences or now_s < self._told_s + self._interval_s:
            return ()
        told = self._sentences
        if self._suppressed:
            told.append(f"and {self._suppressed} more like these")
        self._sentences, self._suppressed = [], 0
        self._told_s = now_s
        return told

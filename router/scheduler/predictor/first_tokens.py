"""Times to the first token, as lessons about an engine's speed.

A prompt that finds no other ahead of it waits for its own computation alone. Its time also contains
the network, the engine's API server and the caller's report, which only ever add to it: of each ten
prompts of about the same length the fastest counts, and the others are not used.
"""

import math

from msgspec import Struct

from router.sequence.active.tracker import FirstToken

GUARDED = 8
"""The first tokens of an engine's life that teach nothing: it compiles and warms up."""

OF_EACH = 10
"""The number of prompts of which the fastest counts."""

WAIT_S = 15.0
"""The time after which the fastest of fewer prompts counts, with a larger error."""

LEAST_ERROR = 0.1
"""The standard error of the fastest of ten, relative to its time."""

ALONE_ERROR = 0.25
"""The same of a prompt without others to compare it with."""

LATE_S = 0.005
"""The standard error of a report's own delay; callers report first tokens together, after 5 ms."""


class Fastest(Struct, gc=False):
    """The fastest of `count` prompts since `since_s`. `ratio`: its time, of the predicted one."""

    token: FirstToken
    ratio: float
    count: int
    since_s: float

    @property
    def error(self) -> float:
        """The standard error of its time, as a fraction."""
        error = max(LEAST_ERROR, ALONE_ERROR / math.sqrt(self.count))
        return math.hypot(error, LATE_S / self.token.waited_s)


class FirstTokens:
    """The first tokens of one rank, by the octave of their length."""

    __slots__ = ("_decades", "_fastest", "_guarded")

    def __init__(self) -> None:
        self._guarded = GUARDED
        self._decades: set[int] = set()
        self._fastest: dict[int, Fastest] = {}

    def restart(self, requests_finished: int) -> None:
        """Begin with another life of the engine, which has finished `requests_finished`."""
        self._guarded = max(GUARDED - requests_finished, 0)
        self._decades.clear()
        self._fastest.clear()

    def add(self, token: FirstToken, ratio: float, now_s: float) -> None:
        """Add a first token; `ratio`: its time relative to the predicted one."""
        decade, octave = int(math.log10(token.tokens)), int(math.log2(token.tokens))
        is_known = decade in self._decades
        self._decades.add(decade)
        if self._guarded or not is_known:
            self._guarded = max(self._guarded - 1, 0)
            return
        known = self._fastest.get(octave)
        if known is None:
            self._fastest[octave] = Fastest(token, ratio, 1, now_s)
            return
        known.count += 1
        if ratio < known.ratio:
            known.token, known.ratio = token, ratio

    def take(self, now_s: float) -> list[Fastest]:
        """Return the fastest of the prompts that are to be compared now. O(lengths)."""
        due = [
            octave
            for octave, each in self._fastest.items()
            if each.count >= OF_EACH or now_s >= each.since_s + WAIT_S
        ]
        return [self._fastest.pop(octave) for octave in due]

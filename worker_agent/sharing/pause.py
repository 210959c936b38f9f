"""The time for which what failed at another worker is not tried again."""

from collections.abc import Callable

LEFT_ALONE_S = 5.0
MAX_LEFT_ALONE_S = 80.0


class Pause:
    """The time for which a worker that failed is left alone: 5 s, doubled up to 80 while it fails.

    Meanwhile its blocks are computed, or read in another way. Each failure may take a whole
    timeout, hence the doubling.
    """

    __slots__ = ("_clock", "_length_s", "_until_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length_s = LEFT_ALONE_S
        self._until_s = float("-inf")

    @property
    def is_on(self) -> bool:
        """True while the worker is left alone."""
        return self._clock() < self._until_s

    def note(self, *, failed: bool) -> None:
        """Record the outcome of a call to the worker."""
        if not failed:
            self._length_s = LEFT_ALONE_S
            return
        self._until_s = self._clock() + self._length_s
        self._length_s = min(2 * self._length_s, MAX_LEFT_ALONE_S)

"""Whether callers say when a prompt is computed.

Most do, and then a prompt that takes longer than predicted is still being computed. Those who only
book and free would seem to queue for as long as their answers take.
"""

MEMORY = 0.99
"""What ended a request ago counts this much."""

USUAL = 0.1
"""Of the requests that end, so many end for other reasons before their prompt is computed."""


class Silence:
    """How many of the requests of late ended without a word about their prompt."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = 0.0

    @property
    def is_usual(self) -> bool:
        """Nobody can be relied upon to say it."""
        return self._share > USUAL

    def note(self, *, is_told: bool) -> None:
        """A request ended."""
        self._share = MEMORY * self._share + (1 - MEMORY) * (not is_told)

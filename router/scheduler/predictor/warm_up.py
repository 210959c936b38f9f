"""The work during which an engine compiles and warms up, which says nothing of its speed.

An engine compiles at the first work of its life, and at the first work of another shape.
"""

import math

from router.protocol.loads import LoadCounters


class WarmUp:
    """The shapes of work that one engine has done in this life.

    A shape: the decades of a step's prompt tokens, and of its decoding requests.
    """

    __slots__ = ("_is_warm", "_shapes")

    def __init__(self) -> None:
        self._is_warm = False
        self._shapes: set[tuple[str, int]] = set()

    def restart(self, *, is_warm: bool) -> None:
        """Begin with another life of the engine, which may have worked before it was seen."""
        self._is_warm = is_warm
        self._shapes.clear()

    def is_first(self, counted: LoadCounters) -> bool:
        """Note this work; return whether any of it was the first of its shape."""
        shapes = _shapes(counted)
        if self._is_warm or shapes <= self._shapes:
            return False
        self._shapes |= shapes
        return True


def _shapes(counted: LoadCounters) -> set[tuple[str, int]]:
    """Return the shapes of this work; that of engines that count no steps is taken for one step."""
    steps = max(counted.steps, 1)
    counts = {"prompt": counted.prefill_tokens, "decode": counted.decode_requests}
    return {(kind, int(math.log10(max(n / steps, 1)))) for kind, n in counts.items() if n}

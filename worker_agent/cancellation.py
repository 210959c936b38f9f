"""Something that is to end: told once, from any thread, to it and to all that belongs to it."""

import weakref
from collections.abc import Callable
from threading import RLock


class Cancellation:
    """Cancelling ends this and what is below it, and nothing above. Whoever is to end keeps its
    own: what nobody keeps is forgotten, with its callbacks.

    Invariant: below a cancelled one everything is cancelled, whenever it was made.
    """

    __slots__ = ("__weakref__", "_above", "_callbacks", "_children", "_lock", "is_cancelled")

    def __init__(self, above: "Cancellation | None" = None) -> None:
        self._above = above
        self.is_cancelled = False
        """Whether it is to end."""
        self._lock = RLock()
        self._children: weakref.WeakSet[Cancellation] = weakref.WeakSet()
        self._callbacks: list[Callable[[], None]] = []

    def child(self) -> "Cancellation":
        """What ends with this, or before."""
        child = Cancellation(self)
        with self._lock:
            self._children.add(child)
            if self.is_cancelled:
                child.cancel()
        return child

    def cancel(self) -> None:
        """It is to end; again is nothing. Callbacks are called here, on this thread."""
        with self._lock:
            self.is_cancelled = True
            callbacks, self._callbacks = self._callbacks, []
            children = list(self._children)
        for callback in callbacks:
            callback()
        for child in children:
            child.cancel()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call this once it is to end: at once, if it is already."""
        with self._lock:
            if not self.is_cancelled:
                self._callbacks.append(callback)
                return
        callback()

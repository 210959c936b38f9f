"""How far the engine is: which iteration, and which layers of it are computed."""

from collections.abc import Sequence

from router.errors import InvalidFieldError
from worker_agent.connector.protocol import (
    IterationComplete,
    LayerComplete,
    LayerNameComplete,
    Requirement,
)


class Progress:
    """Iterations follow each other without a gap; the first may be any."""

    __slots__ = ("_computed", "_layers", "completed", "iteration")

    def __init__(self, layers: Sequence[str] = ()) -> None:
        """`layers`: the engine's names, in order."""
        self._layers = {name: index for index, name in enumerate(layers)}
        self._computed: set[int] = set()
        self.iteration: int | None = None
        """The one that was begun last."""
        self.completed: int | None = None
        """The one that was ended last."""

    def begin(self, iteration: int) -> None:
        """A forward pass begins. Raises InvalidFieldError for one that does not follow."""
        if self.iteration is not None and iteration != self.iteration + 1:
            raise InvalidFieldError("iteration", f"{iteration}", f"{self.iteration + 1}")
        self.iteration = iteration
        self._computed.clear()

    @property
    def is_over(self) -> bool:
        """Whether no forward pass is under way."""
        return self.completed == self.iteration

    def check_layer(self, name: str) -> None:
        """Raises InvalidFieldError for a layer nobody knows."""
        if name not in self._layers:
            allowed = ", ".join(self._layers) or "none"
            raise InvalidFieldError("layer", name, allowed)

    def complete_layer(self, name: str) -> None:
        """A layer was computed. Raises InvalidFieldError for one nobody knows."""
        self.check_layer(name)
        self._computed.add(self._layers[name])

    def end(self) -> None:
        """The forward pass is over; again is nothing."""
        self.completed = self.iteration

    def is_past(self, requirement: Requirement) -> bool:
        """Whether this is over."""
        if self.completed is not None and self.completed >= requirement.iteration:
            return True
        match requirement:
            case IterationComplete():
                return False
            case LayerComplete(layer, iteration):
                return self.iteration == iteration and layer in self._computed
            case LayerNameComplete(name, iteration):
                return self.iteration == iteration and self._layers.get(name) in self._computed

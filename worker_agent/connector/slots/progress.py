"""The engine's progress: its iteration, and the layers computed in it."""

from collections.abc import Sequence

from router.errors import InvalidFieldError
from worker_agent.connector.slots.protocol import (
    IterationComplete,
    LayerComplete,
    LayerNameComplete,
    Requirement,
)


class Progress:
    """Progress of forward passes. Iterations are consecutive; the first may be any."""

    __slots__ = ("_computed", "_layers", "completed", "iteration")

    def __init__(self, layers: Sequence[str] = ()) -> None:
        """Create it before the first iteration. `layers`: the engine's names, in order."""
        self._layers = {name: index for index, name in enumerate(layers)}
        self._computed: set[int] = set()
        self.iteration: int | None = None
        """The iteration begun last."""
        self.completed: int | None = None
        """The iteration ended last."""

    def begin(self, iteration: int) -> None:
        """Begin a forward pass. Raises InvalidFieldError if the iteration is not the next one."""
        if self.iteration is not None and iteration != self.iteration + 1:
            raise InvalidFieldError("iteration", f"{iteration}", f"{self.iteration + 1}")
        self.iteration = iteration
        self._computed.clear()

    @property
    def is_over(self) -> bool:
        """True if no forward pass is running."""
        return self.completed == self.iteration

    def check_layer(self, name: str) -> None:
        """Raise InvalidFieldError if the layer is unknown."""
        if name not in self._layers:
            allowed = ", ".join(self._layers) or "none"
            raise InvalidFieldError("layer", name, allowed)

    def complete_layer(self, name: str) -> None:
        """Mark a layer as computed. Raises InvalidFieldError if it is unknown."""
        self.check_layer(name)
        self._computed.add(self._layers[name])

    def end(self) -> None:
        """End the forward pass; calling it again has no effect."""
        self.completed = self.iteration

    def is_past(self, requirement: Requirement) -> bool:
        """Return whether the engine has passed this requirement."""
        if self.completed is not None and self.completed >= requirement.iteration:
            return True
        match requirement:
            case IterationComplete():
                return False
            case LayerComplete(layer, iteration):
                return self.iteration == iteration and layer in self._computed
            case LayerNameComplete(name, iteration):
                return self.iteration == iteration and self._layers.get(name) in self._computed

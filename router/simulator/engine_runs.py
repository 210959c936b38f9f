"""A run of steps of one engine between two changes of what it works on.

While only decoding goes on each step takes a little longer than the one before, for every request's
context grows by a token: a run of any length has a closed form, and costs as much as one step.
"""

from math import ceil, sqrt

from msgspec import Struct


class Run(Struct, frozen=True, gc=False):
    """`steps` steps, from `start_s`: the first takes `first_step_s`, each next `growth_s` longer.

    `requests` decode in each; in the first their contexts are `kv_tokens` long, all together.
    """

    start_s: float
    steps: int
    first_step_s: float
    growth_s: float
    requests: int
    kv_tokens: int

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self.start_s + self.duration_s(self.steps)

    def duration_s(self, steps: int) -> float:
        """How long the first so many steps take."""
        return steps * self.first_step_s + self.growth_s * (steps * (steps - 1) / 2)

    def resident_kv_tokens(self, steps: int) -> int:
        """The contexts of decoding requests, summed over the first so many steps."""
        return steps * self.kv_tokens + self.requests * (steps * (steps - 1) // 2)

    def steps_begun(self, now_s: float) -> int:
        """The steps that are over or under way, from 1. O(1): the root of a parabola."""
        elapsed_s = now_s - self.start_s
        linear, square = self.first_step_s - self.growth_s / 2, self.growth_s / 2
        root = (sqrt(linear * linear + 4 * square * elapsed_s) + linear) / 2
        steps = max(ceil(elapsed_s / root), 1)
        while steps > 1 and self.duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        while self.duration_s(steps) < elapsed_s:
            steps += 1
        return min(steps, self.steps)

    def steps_done(self, now_s: float) -> int:
        """The steps that are over."""
        begun = self.steps_begun(now_s)
        return begun if self.start_s + self.duration_s(begun) <= now_s else begun - 1

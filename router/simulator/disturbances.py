"""Disturbances of an engine: what its step model does not say, each drawn from a seed.

    step_s = factor · (model's step + draft_s) + warm-up + rest of a pause

A run of steps keeps its closed form: it ends before the next disturbed step, which is a run alone.
"""

from collections.abc import Sequence
from math import exp, inf, log, log1p
from random import Random
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from router.simulator.engine_model import Chunk, StepModel

_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
_Chance: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]

HELD_STEPS = 8
"""The most decode steps in a row with the same noise: a host is busy for longer than one step."""


class Disturbances(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Independent disturbances; by default there are none.

    `noise`: standard deviation of the logarithm of a step's duration, which is right on average;
    up to `HELD_STEPS` decode steps in a row share a value. `straggling`: chance of a step to last
    `straggler_factor` times as long. `pause_interval_s`: mean time between two pauses of `pause_s`,
    in which an engine does nothing; 0: none. `start_s`, `shape_s`: duration of the compilation
    before the first step of a life, and before the first step of a shape (a number of prompt
    tokens or of decoding requests, up to the next power of two). `draft_tokens`: tokens that a
    request drafts in a decode step, which takes `draft_s` longer and verifies them like the tokens
    of further requests; how many are accepted is drawn for each request, from 0 to all.
    `is_preempting`: requests are admitted when their prompt fits; if blocks run out while they
    grow, the request that was admitted last is computed anew. `is_deferring`: a request is
    admitted, and its cached prefix looked up, when a step has room for its prompt after all before
    it, as vLLM does, not as soon as its blocks fit: equal prompts that come at once are computed
    once.
    """

    noise: Annotated[float, Meta(ge=0, le=2)] = 0.0
    straggling: _Chance = 0.0
    straggler_factor: Annotated[float, Meta(ge=1)] = 1.0
    pause_interval_s: _Seconds = 0.0
    pause_s: _Seconds = 0.0
    start_s: _Seconds = 0.0
    shape_s: _Seconds = 0.0
    draft_tokens: _Count = 0
    draft_s: _Seconds = 0.0
    is_preempting: bool = False
    is_deferring: bool = False

    @property
    def stretches_steps(self) -> bool:
        """True if any step may last longer or shorter than its model says."""
        return any((self.noise, self.straggling, self.pause_interval_s, self.start_s, self.shape_s))


CALM = Disturbances()


class StepLoad(Struct, frozen=True, gc=False):
    """The work of a step: prompts, and decoding requests with their contexts in total.

    `grown_tokens`: the tokens by which these contexts grow in a step.
    """

    chunks: Sequence[Chunk]
    requests: int
    kv_tokens: int
    grown_tokens: int


class PlannedSteps(NamedTuple):
    """Steps in a row: the duration of the first, and how much longer each one after it takes."""

    steps: int
    first_step_s: float
    growth_s: float


class StepTimes:
    """The durations of the steps of an engine, in one life of it.

    `slowness` multiplies all of them, from the next run on.
    """

    __slots__ = (
        "_disturbances",
        "_model",
        "_pause_at_s",
        "_rng",
        "_shapes",
        "_straggler_step",
        "slowness",
    )

    def __init__(self, model: StepModel, disturbances: Disturbances, rng: Random) -> None:
        self._model = model
        self._disturbances = disturbances
        self._rng = rng
        self._shapes: set[tuple[bool, int]] = set()
        self._pause_at_s: float | None = None
        self._straggler_step = self._next_straggler(0)
        self.slowness = 1.0

    def tokens_a_step(self) -> int:
        """Return the tokens that a request's decode steps give; draws them for a new request."""
        drafted = self._disturbances.draft_tokens
        return 1 + self._rng.randint(0, drafted) if drafted else 1

    def room_tokens(self, requests: int) -> int:
        """Return the prompt tokens that fit in a step beside decoding requests."""
        return self._model.chunk_tokens - requests * (1 + self._disturbances.draft_tokens)

    def planned(self, load: StepLoad, steps: int, step: int, now_s: float) -> PlannedSteps:
        """Return the next steps, of which `step` are done: at most `steps`, the next changes."""
        drafted = self._disturbances.draft_tokens
        step_s = self._model.step_s(load.chunks, load.requests * (1 + drafted), load.kv_tokens)
        step_s += self._disturbances.draft_s * bool(load.requests)
        growth_s = self._model.growth_s(load.grown_tokens)
        factor, delay_s = self.slowness, 0.0
        if self._disturbances.stretches_steps:
            change, delay_s, steps = self._disturbed(load, steps, step, now_s)
            factor *= change
        return PlannedSteps(steps, factor * step_s + delay_s, factor * growth_s)

    def _disturbed(
        self, load: StepLoad, steps: int, step: int, now_s: float
    ) -> tuple[float, float, int]:
        """Return the factor of the next steps, the delay of the first, and how many they are."""
        factor = self._noise()
        delay_s = self._compiled_s(load) + self._paused_s(now_s)
        if step == self._straggler_step:
            self._straggler_step = self._next_straggler(step + 1)
            return factor * self._disturbances.straggler_factor, delay_s, 1
        until_straggler = self._straggler_step - step
        return factor, delay_s, 1 if delay_s else int(min(steps, HELD_STEPS, until_straggler))

    def _noise(self) -> float:
        deviation = self._disturbances.noise
        return exp(self._rng.gauss(-deviation * deviation / 2, deviation)) if deviation else 1.0

    def _next_straggler(self, step: int) -> float:
        """Return the next straggling step, of which each step is one with the same chance."""
        chance = self._disturbances.straggling
        return step + int(log(1 - self._rng.random()) / log1p(-chance)) if chance else inf

    def _compiled_s(self, load: StepLoad) -> float:
        size = sum(tokens for tokens, _ in load.chunks) or load.requests
        shape = bool(load.chunks), (size - 1).bit_length()
        if shape in self._shapes:
            return 0.0
        start_s = 0.0 if self._shapes else self._disturbances.start_s
        self._shapes.add(shape)
        return start_s + self._disturbances.shape_s

    def _paused_s(self, now_s: float) -> float:
        """Return the rest of a pause that began since the last step. Pauses while idle are over."""
        interval_s, pause_s = self._disturbances.pause_interval_s, self._disturbances.pause_s
        if not interval_s:
            return 0.0
        if self._pause_at_s is None:
            self._pause_at_s = now_s + self._rng.expovariate(1 / interval_s)
        rest_s = 0.0
        while self._pause_at_s <= now_s:
            rest_s = max(rest_s, self._pause_at_s + pause_s - now_s)
            self._pause_at_s += pause_s + self._rng.expovariate(1 / interval_s)
        return rest_s

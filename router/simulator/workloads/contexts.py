"""Building blocks of synthetic traces: contexts that grow, and random lengths and times."""

from math import exp, log, sqrt
from random import Random
from typing import Annotated, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from router.sequence.hashing.block_hashes import chain
from router.simulator.traces import Trace, TraceRequest

LONGEST_PROMPT_TOKENS = 128_000
"""The limit of a prompt's length; longer prompts are cut to it."""

Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
PerSecond: TypeAlias = Annotated[float, Meta(gt=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
Chance: TypeAlias = Annotated[float, Meta(ge=0, le=1)]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OWNER_SHIFT = 24
_SPREAD = 0.6


class Workload(Protocol):
    """The parameters of a synthetic trace."""

    def trace(self, block_size: int, rng: Random) -> Trace:
        """Return the trace. O(blocks of all prompts)."""


class Context:
    """Text that only grows, optionally after another text, as it is now, that many contexts share.

    `owner`: a number that no other context has.
    """

    __slots__ = ("_owner", "_shared", "_shared_tokens", "tokens")

    def __init__(self, owner: int, tokens: int, shared: "Context | None" = None) -> None:
        self._owner = owner
        self._shared = shared
        self._shared_tokens = 0 if shared is None else shared.tokens
        self.tokens: int = self._shared_tokens + tokens

    def grow(self, tokens: int) -> None:
        """Append `tokens` tokens."""
        self.tokens += tokens

    def prompt(self, limit_tokens: int, block_size: int) -> tuple[int, list[int]]:
        """Return all of the text so far, up to a limit: its tokens and its blocks. O(blocks)."""
        isl_tokens = min(self.tokens, limit_tokens)
        names = self._names(np.arange(isl_tokens // block_size, dtype=np.uint64), block_size)
        return isl_tokens, chain(names * _ODD).tolist()

    def request(self, arrival_s: float, osl_tokens: int, block_size: int) -> TraceRequest:
        """Return a request with all of the text so far. O(blocks)."""
        isl_tokens, hashes = self.prompt(LONGEST_PROMPT_TOKENS, block_size)
        return TraceRequest(arrival_s, isl_tokens, osl_tokens, hashes)

    def _names(self, blocks: npt.NDArray[np.uint64], block_size: int) -> npt.NDArray[np.uint64]:
        names = blocks + np.uint64(self._owner + 1 << _OWNER_SHIFT)
        if self._shared is not None:
            whole = self._shared_tokens // block_size
            names[:whole] = self._shared._names(blocks[:whole], block_size)
        return names


class Skewed(NamedTuple):
    """A log-normal quantity with this mean and median; values above `most` are drawn again.

    `most` 0: no limit.
    """

    mean: float
    median: float
    most: float = 0.0

    def check(self, name: str) -> None:
        """Raise ValueError if no log-normal quantity is like that."""
        if self.mean < self.median:
            raise ValueError(f"{name} is {self.mean:g}, less than the median {self.median:g}")
        if self.most and self.most < self.median:
            raise ValueError(f"most_{name} is {self.most:g}, less than the median {self.median:g}")

    def draw(self, rng: Random) -> float:
        """Return a value."""
        deviation = sqrt(2 * log(self.mean / self.median))
        while True:
            value = self.median * exp(rng.gauss(0.0, deviation)) if deviation else self.median
            if not self.most or value <= self.most:
                return value


def about(rng: Random, tokens: int) -> int:
    """Return a log-normal length of this mean: most are shorter, some several times as long."""
    return max(round(tokens * exp(rng.gauss(-_SPREAD * _SPREAD / 2, _SPREAD))), 1)


def exponential(rng: Random, mean: float) -> float:
    """Return an exponential time with this mean; 0 if the mean is 0."""
    return rng.expovariate(1 / mean) if mean else 0.0

"""What made-up traces are put together from: contexts that grow, sessions that go on."""

from collections.abc import Callable, Iterator
from math import exp
from random import Random
from typing import TypeAlias

import numpy as np

from router.sequence.hashing import chain
from router.simulator.traces import TraceRequest

LONGEST_PROMPT_TOKENS = 128_000
"""What is left of a longer one."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OWNER_SHIFT = 24
_ANSWER_S, _TOKEN_S = 1.0, 0.04
_SPREAD = 0.6


class Context:
    """Text that only grows, perhaps behind another text that many share. `owner`: a number that no
    other context has.
    """

    __slots__ = ("_owner", "_shared", "tokens")

    def __init__(self, owner: int, tokens: int, shared: "Context | None" = None) -> None:
        self._owner = owner
        self._shared = shared
        self.tokens: int = tokens if shared is None else shared.tokens + tokens

    def grow(self, tokens: int) -> None:
        """Append so many tokens."""
        self.tokens += tokens

    def request(self, arrival_s: float, osl_tokens: int, block_size: int) -> TraceRequest:
        """A request with all of the text so far. O(blocks)."""
        isl_tokens = min(self.tokens, LONGEST_PROMPT_TOKENS)
        blocks = np.arange(isl_tokens // block_size, dtype=np.uint64)
        names = blocks + np.uint64(self._owner + 1 << _OWNER_SHIFT)
        if self._shared is not None:
            whole = self._shared.tokens // block_size
            shared_names = blocks[:whole] + np.uint64(self._shared._owner + 1 << _OWNER_SHIFT)
            names[:whole] = shared_names
        return TraceRequest(arrival_s, isl_tokens, osl_tokens, chain(names * _ODD).tolist())


MakeSession: TypeAlias = Callable[[int, float, int], Iterator[TraceRequest]]
"""The requests of a session, given its owner, its start and how many there are to be."""


def sessions(
    requests: int, requests_per_s: float, length: int, make: MakeSession, rng: Random
) -> list[TraceRequest]:
    """So many requests of sessions that begin at random, of `length` requests on average.

    In order of arrival; the last sessions are cut off.
    """
    made: list[TraceRequest] = []
    start_s, owner = 0.0, 1 << 20
    while len(made) < 2 * requests:
        start_s += rng.expovariate(requests_per_s / length)
        owner += 1
        made += make(owner, start_s, 1 + int(exponential(rng, length - 0.5)))
    made.sort(key=_arrival_s)
    return made[:requests]


def about(rng: Random, tokens: int) -> int:
    """A length with this mean, log-normal: most are shorter, some are several times as long."""
    return max(round(tokens * exp(rng.gauss(-_SPREAD * _SPREAD / 2, _SPREAD))), 1)


def exponential(rng: Random, mean: float) -> float:
    """A time with this mean; 0 where that is."""
    return rng.expovariate(1 / mean) if mean else 0.0


def answered_s(osl_tokens: int) -> float:
    """About how long an answer takes, after which a session goes on."""
    return _ANSWER_S + _TOKEN_S * osl_tokens


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s

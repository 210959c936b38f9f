"""Building blocks of synthetic traces: growing contexts, and sessions of several requests.

Synthetic traces of very different shapes, each from a few numbers and a seed.

They differ in what requests share: a system prompt with all its users, a conversation's history
with its next turn, an agent's context with its next step, and nothing at all in the long tail.
"""

from collections.abc import Callable, Iterator, Mapping
from math import exp
from random import Random
from types import MappingProxyType
from typing import Annotated, Protocol, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from router.sequence.hashing.block_hashes import chain
from router.simulator.traces import Trace, TraceRequest

LONGEST_PROMPT_TOKENS = 128_000
"""The limit of a prompt's length; longer prompts are cut to it."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OWNER_SHIFT = 24
_ANSWER_S, _TOKEN_S = 1.0, 0.04
_SPREAD = 0.6


class Context:
    """Text that only grows, optionally after another text that many contexts share.

    `owner`: a number that no other context has.
    """

    __slots__ = ("_owner", "_shared", "tokens")

    def __init__(self, owner: int, tokens: int, shared: "Context | None" = None) -> None:
        self._owner = owner
        self._shared = shared
        self.tokens: int = tokens if shared is None else shared.tokens + tokens

    def grow(self, tokens: int) -> None:
        """Append `tokens` tokens."""
        self.tokens += tokens

    def request(self, arrival_s: float, osl_tokens: int, block_size: int) -> TraceRequest:
        """Return a request with all of the text so far. O(blocks)."""
        isl_tokens = min(self.tokens, LONGEST_PROMPT_TOKENS)
        blocks = np.arange(isl_tokens // block_size, dtype=np.uint64)
        names = blocks + np.uint64(self._owner + 1 << _OWNER_SHIFT)
        if self._shared is not None:
            whole = self._shared.tokens // block_size
            shared_names = blocks[:whole] + np.uint64(self._shared._owner + 1 << _OWNER_SHIFT)
            names[:whole] = shared_names
        return TraceRequest(arrival_s, isl_tokens, osl_tokens, chain(names * _ODD).tolist())


MakeSession: TypeAlias = Callable[[int, float, int], Iterator[TraceRequest]]
"""A function that makes the requests of a session from its owner, start and number of requests."""


def sessions(
    requests: int, requests_per_s: float, length: int, make: MakeSession, rng: Random
) -> list[TraceRequest]:
    """Return requests of sessions that begin at random, of `length` requests on average.

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
    """Return a log-normal length of this mean: most are shorter, some several times as long."""
    return max(round(tokens * exp(rng.gauss(-_SPREAD * _SPREAD / 2, _SPREAD))), 1)


def exponential(rng: Random, mean: float) -> float:
    """Return an exponential time with this mean; 0 if the mean is 0."""
    return rng.expovariate(1 / mean) if mean else 0.0


def answered_s(osl_tokens: int) -> float:
    """Return the approximate duration of a response, after which a session continues."""
    return _ANSWER_S + _TOKEN_S * osl_tokens


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s


Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
PerSecond: TypeAlias = Annotated[float, Meta(gt=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]


class Workload(Protocol):
    """The parameters of a synthetic trace."""

    def trace(self, block_size: int, rng: Random) -> Trace:
        """Return the trace. O(blocks of all prompts)."""


class _Numbers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The total number of requests; subclasses have their rate, `requests_per_s` on average."""

    requests: Count = 5000


class SharedPrompts(_Numbers, frozen=True, kw_only=True):
    """Short questions after long system prompts; the most popular prompt has the most questions."""

    requests_per_s: PerSecond = 40.0
    prompts: Count = 40
    prompt_tokens: Tokens = 3000
    question_tokens: Tokens = 300
    output_tokens: Tokens = 200

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        prompts = [Context(i, about(rng, self.prompt_tokens)) for i in range(self.prompts)]
        weights = [1 / (i + 1) for i in range(self.prompts)]
        requests, now_s = [], 0.0
        for owner in range(self.prompts, self.prompts + self.requests):
            now_s += rng.expovariate(self.requests_per_s)
            context = Context(owner, 0, rng.choices(prompts, weights)[0])
            context.grow(about(rng, self.question_tokens))
            requests.append(context.request(now_s, about(rng, self.output_tokens), block_size))
        return Trace("shared-prompts", block_size, requests)


class MultiTurn(_Numbers, frozen=True, kw_only=True):
    """Conversations: each turn repeats everything before it, after a think time."""

    requests_per_s: PerSecond = 16.0
    turns: Count = 6
    system_tokens: Tokens = 1000
    question_tokens: Tokens = 400
    output_tokens: Tokens = 350
    think_s: Seconds = 15.0

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        system = Context(0, self.system_tokens)

        def session(owner: int, start_s: float, turns: int) -> Iterator[TraceRequest]:
            context, now_s = Context(owner, 0, system), start_s
            for _ in range(turns):
                context.grow(about(rng, self.question_tokens))
                output_tokens = about(rng, self.output_tokens)
                yield context.request(now_s, output_tokens, block_size)
                context.grow(output_tokens)
                now_s += answered_s(output_tokens) + exponential(rng, self.think_s)

        made = sessions(self.requests, self.requests_per_s, self.turns, session, rng)
        return Trace("multi-turn", block_size, made)


class Agents(_Numbers, frozen=True, kw_only=True):
    """Agents: many quick steps over a context that grows by the results of their tools."""

    requests_per_s: PerSecond = 12.0
    kinds: Count = 8
    steps: Count = 20
    instruction_tokens: Tokens = 8000
    result_tokens: Tokens = 1500
    output_tokens: Tokens = 120
    tool_s: Seconds = 1.5

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        kinds = [Context(i, self.instruction_tokens) for i in range(self.kinds)]

        def session(owner: int, start_s: float, steps: int) -> Iterator[TraceRequest]:
            context, now_s = Context(owner, 0, rng.choice(kinds)), start_s
            for _ in range(steps):
                context.grow(about(rng, self.result_tokens))
                output_tokens = about(rng, self.output_tokens)
                yield context.request(now_s, output_tokens, block_size)
                context.grow(output_tokens)
                now_s += answered_s(output_tokens) + exponential(rng, self.tool_s)

        made = sessions(self.requests, self.requests_per_s, self.steps, session, rng)
        return Trace("agents", block_size, made)


class LongTail(_Numbers, frozen=True, kw_only=True):
    """Prompts that share nothing: most are short, a few are long enough to delay all others.

    Lengths are Pareto-distributed; a `shape` nearer to 1 makes them longer.
    """

    requests_per_s: PerSecond = 16.0
    least_tokens: Tokens = 500
    shape: Annotated[float, Meta(gt=1)] = 1.2
    output_tokens: Tokens = 250

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        requests, now_s = [], 0.0
        for owner in range(self.requests):
            now_s += rng.expovariate(self.requests_per_s)
            context = Context(owner, int(self.least_tokens * rng.paretovariate(self.shape)))
            requests.append(context.request(now_s, about(rng, self.output_tokens), block_size))
        return Trace("long-tail", block_size, requests)


WORKLOADS: Mapping[str, type[Workload]] = MappingProxyType(
    {
        "shared-prompts": SharedPrompts,
        "multi-turn": MultiTurn,
        "agents": Agents,
        "long-tail": LongTail,
    }
)

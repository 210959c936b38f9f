"""Synthetic traces of very different shapes, whose requests arrive whatever became of others.

They differ in what requests share: a system prompt with all its users, a conversation's history
with its next turn, an agent's context with its next step, and nothing at all in the long tail.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from router.simulator.traces import Trace, TraceRequest
from router.simulator.workloads.contexts import (
    Chance,
    Context,
    Count,
    PerSecond,
    Seconds,
    Tokens,
    about,
    exponential,
)

_ANSWER_S, _TOKEN_S = 1.0, 0.04

_MakeSession: TypeAlias = Callable[[int, float, int], Iterator[TraceRequest]]
"""A function that makes the requests of a session from its owner, start and number of requests."""


def _sessions(
    requests: int, requests_per_s: float, length: int, make: _MakeSession, rng: Random
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


def _answered_s(osl_tokens: int) -> float:
    """Return the approximate duration of a response, after which a session continues."""
    return _ANSWER_S + _TOKEN_S * osl_tokens


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s


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
                now_s += _answered_s(output_tokens) + exponential(rng, self.think_s)

        made = _sessions(self.requests, self.requests_per_s, self.turns, session, rng)
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
                now_s += _answered_s(output_tokens) + exponential(rng, self.tool_s)

        made = _sessions(self.requests, self.requests_per_s, self.steps, session, rng)
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


class Documents(_Numbers, frozen=True, kw_only=True):
    """Conversations, and beside them long documents that come once, for a short summary.

    `documents_part`: of the requests. Documents have half to one and a half times their tokens.
    """

    requests_per_s: PerSecond = 6.0
    documents_part: Chance = 0.03
    document_tokens: Tokens = 50_000
    turns: Count = 8
    question_tokens: Tokens = 1000
    output_tokens: Tokens = 60

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        documents = min(round(self.requests * self.documents_part), self.requests - 1)
        chats = MultiTurn(
            requests=self.requests - documents,
            requests_per_s=self.requests_per_s * (1 - documents / self.requests),
            turns=self.turns,
            system_tokens=2 * self.question_tokens,
            question_tokens=self.question_tokens,
            output_tokens=self.output_tokens,
        )
        requests = list(chats.trace(block_size, rng).requests)
        end_s = requests[-1].arrival_s
        for owner in range(1, documents + 1):
            tokens = rng.randint(self.document_tokens // 2, self.document_tokens * 3 // 2)
            output_tokens = about(rng, self.output_tokens)
            document = Context(owner, max(tokens, 1))
            requests.append(document.request(rng.uniform(0, end_s), output_tokens, block_size))
        return Trace("documents", block_size, sorted(requests, key=_arrival_s))

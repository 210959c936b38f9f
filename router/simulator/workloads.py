"""Made-up traces of very different shapes, each from a few numbers and a seed.

What is shared is what matters: a system prompt with everybody who uses it, a conversation's history
with its next turn, an agent's context with its next step, and in the long tail nothing at all.
"""

from collections.abc import Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import Annotated, Protocol, TypeAlias

from msgspec import Meta, Struct

from router.simulator.made_up import Context, about, answered_s, exponential, sessions
from router.simulator.traces import Trace, TraceRequest

Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
PerSecond: TypeAlias = Annotated[float, Meta(gt=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]


class Workload(Protocol):
    """Numbers that make a trace."""

    def trace(self, block_size: int, rng: Random) -> Trace:
        """The trace. O(blocks of all prompts)."""


class _Numbers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`requests` in all, so many a second on average."""

    requests: Count = 5000


class SharedPrompts(_Numbers, frozen=True, kw_only=True):
    """Short questions behind long system prompts; the most popular one takes the most of them."""

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
    """Conversations: each turn repeats all that was said before, after a time to think."""

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
    """Agents: many quick steps over a context that grows by what their tools return."""

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
    """Prompts that share nothing: most are short, a few so long that they hold up all others
    (Pareto; `shape` towards 1 makes them longer).
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

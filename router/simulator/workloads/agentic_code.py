"""Coding agents in a closed loop: tools, people, subagents, and sessions that end.

    turn ─▶ response ─▶ a tool (seconds) or a person (a minute) ─▶ turn with all of it ─▶ … ─▶ end
                └─▶ subagents, all at once, each with turns of its own ─▶ turn with their results

The distributions and their defaults are those of aiperf's generator of agentic code, whose sessions
have no subagents: a system prompt and tools that all share, a project's instructions that its
sessions share, files of one session, and turns that grow by what tools return.
"""

from collections.abc import Sequence
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from router.simulator.traces import Trace, TraceRequest
from router.simulator.workloads.contexts import (
    Chance,
    Context,
    Count,
    PerSecond,
    Seconds,
    Skewed,
    Tokens,
    about,
    exponential,
)

LEAST_OUTPUT_TOKENS = 30
"""The shortest response."""

_HURRY, _LEAST_DELAY = 0.8, 0.2
"""At the context limit, delays are this fraction shorter; they are never below that fraction."""

_Tokens0 = Annotated[int, Meta(ge=0, le=1_000_000)]


class AgenticCode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions of coding agents, which begin at random, `sessions_per_s` on average.

    Quantities with a `median_…` are log-normal; with a `most_…` above 0, larger ones are drawn
    again. `project_skew`: the exponent of Zipf's law for the popularity of projects.
    `tool_fraction`: turns that follow a tool, not a person; delays shorten as the context grows.
    A session ends when its context would exceed `context_limit_tokens`, or after a turn with
    `end_chance`, which is `end_growth` times as much at the limit.

    `fan_out_chance`: of a turn to be followed by 2 to `most_subagents` subagents, not by a tool.
    With `fork_chance` they go on with their parent's context; otherwise they share
    `subagent_system_tokens` with all subagents, and a briefing with their siblings.
    """

    sessions: Count = 200
    sessions_per_s: PerSecond = 0.1
    system_tokens: _Tokens0 = 32_000
    projects: Count = 50
    project_tokens: _Tokens0 = 20_000
    project_skew: Annotated[float, Meta(ge=0)] = 1.2
    file_tokens: Tokens = 10_000
    median_file_tokens: Tokens = 5_000
    most_file_tokens: _Tokens0 = 0
    new_tokens: Tokens = 3_500
    median_new_tokens: Tokens = 1_800
    output_tokens: Tokens = 500
    median_output_tokens: Tokens = 300
    tool_fraction: Chance = 0.7
    tool_s: Annotated[float, Meta(gt=0)] = 2.5
    median_tool_s: Annotated[float, Meta(gt=0)] = 1.8
    most_tool_s: Seconds = 0.0
    human_s: Annotated[float, Meta(gt=0)] = 40.0
    median_human_s: Annotated[float, Meta(gt=0)] = 25.0
    most_human_s: Seconds = 0.0
    end_chance: Chance = 0.02
    end_growth: Annotated[float, Meta(ge=1)] = 2.0
    context_limit_tokens: Tokens = 200_000
    fan_out_chance: Chance = 0.04
    most_subagents: Annotated[int, Meta(ge=2, le=64)] = 8
    fork_chance: Chance = 0.3
    subagent_system_tokens: Tokens = 12_000
    briefing_tokens: Tokens = 8_000
    subagent_turns: Count = 4

    def __post_init__(self) -> None:
        self.file_sizes.check("file_tokens")
        self.new_sizes.check("new_tokens")
        self.output_sizes.check("output_tokens")
        self.tool_times_s.check("tool_s")
        self.human_times_s.check("human_s")
        if self.system_tokens + self.project_tokens >= self.context_limit_tokens:
            raise ValueError("system_tokens and project_tokens exceed context_limit_tokens")

    @property
    def file_sizes(self) -> Skewed:
        """The sizes of the files with which a session begins."""
        return Skewed(self.file_tokens, self.median_file_tokens, self.most_file_tokens)

    @property
    def new_sizes(self) -> Skewed:
        """The sizes of what a tool returns or a person writes."""
        return Skewed(self.new_tokens, self.median_new_tokens)

    @property
    def output_sizes(self) -> Skewed:
        """The sizes of responses."""
        return Skewed(self.output_tokens, self.median_output_tokens)

    @property
    def tool_times_s(self) -> Skewed:
        """The durations of tools."""
        return Skewed(self.tool_s, self.median_tool_s, self.most_tool_s)

    @property
    def human_times_s(self) -> Skewed:
        """The times until a person goes on."""
        return Skewed(self.human_s, self.median_human_s, self.most_human_s)

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        made = _Sessions(self, block_size, rng)
        start_s = 0.0
        for number in range(self.sessions):
            made.add(number, start_s)
            start_s += rng.expovariate(self.sessions_per_s)
        return Trace("agentic-code", block_size, made.requests)


class _Agent:
    """An agent at work: its session, its context, and its last request, if it has made one."""

    __slots__ = ("context", "output_tokens", "request", "session", "start_s")

    def __init__(self, session: int, start_s: float, context: Context) -> None:
        self.session = session
        self.start_s = start_s
        self.context = context
        self.request = -1
        self.output_tokens = 0


class _Sessions:
    """The sessions made so far, as requests."""

    __slots__ = ("_block_size", "_numbers", "_owner", "_projects", "_rng", "_subagents", "requests")

    def __init__(self, numbers: AgenticCode, block_size: int, rng: Random) -> None:
        self.requests: list[TraceRequest] = []
        self._numbers = numbers
        self._block_size = block_size
        self._rng = rng
        self._owner = 0
        system = self._context(numbers.system_tokens)
        self._subagents = self._context(numbers.subagent_system_tokens)
        self._projects = [
            self._context(numbers.project_tokens, system) for _ in range(numbers.projects)
        ]

    def add(self, session: int, start_s: float) -> None:
        """Make a session and all of its subagents."""
        numbers, rng = self._numbers, self._rng
        weights = [(i + 1) ** -numbers.project_skew for i in range(numbers.projects)]
        project = rng.choices(self._projects, weights)[0]
        context = self._context(max(int(numbers.file_sizes.draw(rng)), 1), project)
        context.tokens = min(context.tokens, numbers.context_limit_tokens - 1)
        agent = _Agent(session, start_s, context)
        self._ask(agent, (), 0.0)
        while self._continue(agent):
            pass

    def _continue(self, agent: _Agent) -> bool:
        """Make the next turn of a session; return False if it ends instead."""
        numbers, rng = self._numbers, self._rng
        after, new_tokens, think_s = self._work_between_turns(agent)
        agent.context.grow(agent.output_tokens + new_tokens)
        fullness = agent.context.tokens / numbers.context_limit_tokens
        end_chance = numbers.end_chance * (1 + (numbers.end_growth - 1) * fullness)
        if fullness >= 1 or rng.random() < end_chance:
            return False
        self._ask(agent, after, think_s)
        return True

    def _work_between_turns(self, agent: _Agent) -> tuple[Sequence[int], int, float]:
        """Return what the next turn waits for, its new tokens, and the time after the wait."""
        numbers, rng = self._numbers, self._rng
        if rng.random() < numbers.fan_out_chance:
            children = self._fan_out(agent)
            results = sum(self.requests[child].osl_tokens for child in children)
            return children, results, 0.0
        is_tool = rng.random() < numbers.tool_fraction
        times_s = numbers.tool_times_s if is_tool else numbers.human_times_s
        return (agent.request,), self._new_tokens(), self._delay_s(agent, times_s)

    def _fan_out(self, parent: _Agent) -> list[int]:
        """Make subagents, all of which begin at once; return the last request of each."""
        numbers, rng = self._numbers, self._rng
        shared = parent.context
        if rng.random() < numbers.fork_chance:
            parent.context.grow(parent.output_tokens)
            parent.output_tokens = 0
        else:
            shared = self._context(about(rng, numbers.briefing_tokens), self._subagents)
        count = rng.randint(2, numbers.most_subagents)
        return [self._subagent(parent, shared) for _ in range(count)]

    def _subagent(self, parent: _Agent, shared: Context) -> int:
        numbers = self._numbers
        context = self._context(self._new_tokens(), shared)
        agent = _Agent(parent.session, parent.start_s, context)
        after, think_s = parent.request, 0.0
        for _ in range(1 + int(exponential(self._rng, numbers.subagent_turns - 0.5))):
            if context.tokens >= numbers.context_limit_tokens:
                break
            self._ask(agent, (after,), think_s)
            after, think_s = agent.request, self._delay_s(agent, numbers.tool_times_s)
            context.grow(agent.output_tokens + self._new_tokens())
        return after

    def _ask(self, agent: _Agent, after: Sequence[int], think_s: float) -> None:
        """Make a request with all of an agent's context."""
        numbers = self._numbers
        agent.output_tokens = max(int(numbers.output_sizes.draw(self._rng)), LEAST_OUTPUT_TOKENS)
        isl_tokens, hashes = agent.context.prompt(numbers.context_limit_tokens, self._block_size)
        agent.request = len(self.requests)
        self.requests.append(
            TraceRequest(
                arrival_s=agent.start_s,
                isl_tokens=isl_tokens,
                osl_tokens=agent.output_tokens,
                sequence_hashes=hashes,
                session=agent.session,
                after=tuple(dict.fromkeys(after)),
                think_s=think_s,
            )
        )

    def _delay_s(self, agent: _Agent, times_s: Skewed) -> float:
        fullness = agent.context.tokens / self._numbers.context_limit_tokens
        return times_s.draw(self._rng) * max(1 - _HURRY * fullness, _LEAST_DELAY)

    def _new_tokens(self) -> int:
        return max(int(self._numbers.new_sizes.draw(self._rng)), 1)

    def _context(self, tokens: int, shared: Context | None = None) -> Context:
        self._owner += 1
        return Context(self._owner, tokens, shared)

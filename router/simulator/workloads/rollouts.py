"""Group rollouts: the same prompt many times at once, as reinforcement learning samples answers."""

from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from router.simulator.traces import Trace, TraceRequest
from router.simulator.workloads.contexts import Context, Count, Seconds, Tokens, about

_Prompts = Annotated[int, Meta(ge=1, le=1024)]


class Rollouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups of equal prompts that arrive at once; each group is a session.

    `prompts`: the prompts of a group, whose lengths are between `least_prompt_tokens` and
    `most_prompt_tokens`. `at_once` groups are sampled side by side, and the first of them begin
    `stagger_s` after each other; when one has ended, the next begins after `pause_s`.
    """

    groups: Count = 24
    prompts: _Prompts = 16
    at_once: Count = 4
    stagger_s: Seconds = 2.0
    pause_s: Seconds = 0.5
    least_prompt_tokens: Tokens = 16_000
    most_prompt_tokens: Tokens = 32_000
    output_tokens: Tokens = 400

    def __post_init__(self) -> None:
        if self.least_prompt_tokens > self.most_prompt_tokens:
            raise ValueError(
                f"least_prompt_tokens is {self.least_prompt_tokens}, "
                f"more than most_prompt_tokens, {self.most_prompt_tokens}"
            )

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        requests: list[TraceRequest] = []
        for group in range(self.groups):
            requests += self._group(group, block_size, rng)
        return Trace("rollouts", block_size, requests)

    def _group(self, group: int, block_size: int, rng: Random) -> list[TraceRequest]:
        isl_tokens = rng.randint(self.least_prompt_tokens, self.most_prompt_tokens)
        _, hashes = Context(group, isl_tokens).prompt(isl_tokens, block_size)
        first = (group - self.at_once) * self.prompts
        after = tuple(range(first, first + self.prompts)) if first >= 0 else ()
        return [
            TraceRequest(
                arrival_s=min(group, self.at_once - 1) * self.stagger_s,
                isl_tokens=isl_tokens,
                osl_tokens=about(rng, self.output_tokens),
                sequence_hashes=hashes,
                session=group,
                after=after,
                think_s=self.pause_s if after else 0.0,
            )
            for _ in range(self.prompts)
        ]

"""Users in a closed loop: a fixed number at once, as benchmarks with a concurrency ask a fleet."""

from random import Random

from msgspec import Struct

from router.simulator.traces import Trace, TraceRequest
from router.simulator.workloads.contexts import (
    LONGEST_PROMPT_TOKENS,
    Context,
    Count,
    Seconds,
    Tokens,
    about,
    exponential,
)


class ChatUsers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations of `users` users at once; each is a session of `turns` turns.

    A user begins the next conversation `think_s` after the last response of the one before it, and
    sends each turn as long after the response to the turn before. Conversations share `systems`
    system prompts. Times are exponential.
    """

    conversations: Count = 60
    users: Count = 4
    turns: Count = 6
    systems: Count = 3
    system_tokens: Tokens = 4_000
    question_tokens: Tokens = 1_000
    output_tokens: Tokens = 40
    think_s: Seconds = 0.5

    def trace(self, block_size: int, rng: Random) -> Trace:
        """See `Workload`."""
        systems = [Context(i, about(rng, self.system_tokens)) for i in range(self.systems)]
        requests: list[TraceRequest] = []
        for conversation in range(self.conversations):
            previous = conversation - self.users
            after = ((previous + 1) * self.turns - 1,) if previous >= 0 else ()
            context = Context(self.systems + conversation, 0, rng.choice(systems))
            requests += self._turns(conversation, context, after, block_size, rng)
        return Trace("chat-users", block_size, requests)

    def _turns(
        self,
        conversation: int,
        context: Context,
        after: tuple[int, ...],
        block_size: int,
        rng: Random,
    ) -> list[TraceRequest]:
        turns = []
        for number in range(conversation * self.turns, (conversation + 1) * self.turns):
            context.grow(about(rng, self.question_tokens))
            isl_tokens, hashes = context.prompt(LONGEST_PROMPT_TOKENS, block_size)
            osl_tokens = about(rng, self.output_tokens)
            context.grow(osl_tokens)
            turns.append(
                TraceRequest(
                    arrival_s=0.0,
                    isl_tokens=isl_tokens,
                    osl_tokens=osl_tokens,
                    sequence_hashes=hashes,
                    session=conversation,
                    after=after,
                    think_s=exponential(rng, self.think_s) if after else 0.0,
                )
            )
            after = (number,)
        return turns

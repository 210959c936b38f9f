"""A router and two reference engines for what other systems do with them."""

from support.processes.processes import Fleet
from support.processes.servers import eventually

TEXTS = {1: "The first worker holds this text. " * 8, 2: "And the second one holds another. " * 8}
"""By worker id: what it has answered before, of more than a block."""

BLOCK = 16


class SystemsFleet(Fleet):
    """A fleet whose workers each hold a text."""

    async def begin(self):
        # The default policy may try the other worker, whose rate is unknown.
        self.router_options |= {"policy": "dynamo-1.6"}
        await self.start(workers=2)
        await eventually(self.all_exact)
        for worker_id, text in TEXTS.items():
            await self.complete(worker_id, 0, list(text.encode()), 1)
        await self.until_drained()

    async def load(self):
        """Active requests, and prompt tokens to compute."""
        ranks = [rank for scope in await self.get("/loads") for rank in scope["loads"]]
        keys = "active_requests", "potential_prefill_tokens"
        return tuple(sum(rank[key] for rank in ranks) for key in keys)

    async def until_load(self, *load):
        async def is_there():
            seen.append(await self.load())
            return seen[-1] == load

        seen = []
        try:
            await eventually(is_there, timeout_s=20)
        except TimeoutError as error:
            raise AssertionError(f"the load was {set(seen)}, never {load}") from error


def check_cached(usage, text):
    """A prompt that one worker alone holds was sent there: all of it but a block was cached."""
    prompt_tokens = usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert prompt_tokens >= len(text)
    assert prompt_tokens - cached <= 2 * BLOCK + prompt_tokens - len(text)

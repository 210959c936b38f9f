"""An OpenAI client whose requests go where the router says.

    kv-router up                                     # in another terminal
    pip install openai
    python examples/openai_client.py --router http://127.0.0.1:8092

Each turn of a conversation repeats the turns before it. The router sends it to the engine that
holds them; the engine says how much of the prompt it had cached.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable

from openai import AsyncOpenAI
from openai.types import Completion

from router.client import RouterClient, SelectRequest, Usage

TURNS = (
    "You are a patient teacher. What is a key-value cache, and why does its prefix matter?",
    "And what happens when two requests begin with the same words?",
    "Say it once more, in one sentence.",
)


class RoutedCompletions:
    """Completions, streamed from the engine that the router chooses.

    `tokenise` must be the engines' own: prefixes are found by tokens. For vLLM ask its `/tokenize`,
    or load the model's tokeniser; the reference engine reads bytes.
    """

    def __init__(
        self, router: RouterClient, model: str, tokenise: Callable[[str], list[int]]
    ) -> None:
        self._router = router
        self._model = model
        self._tokenise = tokenise
        self._engines: dict[str, AsyncOpenAI] = {}

    async def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[Completion]:
        """Yield the chunks of a response. Its reservation is freed in any case."""
        request = SelectRequest(token_ids=self._tokenise(prompt), expected_output_tokens=max_tokens)
        async with self._router.reserve(request) as reservation:
            place = reservation.decision
            chunks = await self._engine(place.endpoint).completions.create(
                model=self._model,
                prompt=prompt,
                max_tokens=max_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-data-parallel-rank": str(place.dp_rank)},
            )
            async for chunk in reservation.follow(chunks, lambda chunk: len(chunk.choices)):
                if chunk.usage is not None:
                    reservation.usage = _usage(chunk)
                yield chunk

    async def close(self) -> None:
        """Close the connections to all engines."""
        for engine in self._engines.values():
            await engine.close()

    def _engine(self, endpoint: str) -> AsyncOpenAI:
        if endpoint not in self._engines:
            self._engines[endpoint] = AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none")
        return self._engines[endpoint]


def _usage(chunk: Completion) -> Usage:
    """Return the usage that the engine reports; a stream reports it last."""
    assert chunk.usage is not None
    details = chunk.usage.prompt_tokens_details
    cached_tokens = (details.cached_tokens or 0) if details else 0
    return Usage(prompt_tokens=chunk.usage.prompt_tokens, cached_tokens=cached_tokens)


async def converse(router_url: str, model: str, max_tokens: int) -> AsyncIterator[tuple[int, int]]:
    """Print a conversation; of every turn, the tokens of its prompt and how many were cached."""
    async with RouterClient.over_http(router_url) as router:
        completions = RoutedCompletions(router, model, lambda text: list(text.encode()))
        context = ""
        for turn in TURNS:
            context += f"\nUser: {turn}\nTeacher: "
            figures = (0, 0)
            async for chunk in completions.stream(context, max_tokens):
                context += "".join(choice.text for choice in chunk.choices)
                if chunk.usage is not None:
                    usage = _usage(chunk)
                    figures = (usage.prompt_tokens, usage.cached_tokens or 0)
            print(f"{turn[:44]:<46} {figures[0]:>5} tokens, {figures[1]:>5} cached")
            yield figures
        await completions.close()


def main() -> None:
    """Read the command line and converse."""
    parser = argparse.ArgumentParser(description="A conversation, placed by the router.")
    parser.add_argument("--router", default="http://127.0.0.1:8092", help="its URL")
    parser.add_argument("--model", default="default", help="what the engines call it")
    parser.add_argument("--max-tokens", type=int, default=64, help="of every answer")
    options = parser.parse_args()
    asyncio.run(_converse_to_the_end(options.router, options.model, options.max_tokens))


async def _converse_to_the_end(router_url: str, model: str, max_tokens: int) -> None:
    async for _ in converse(router_url, model, max_tokens):
        pass


if __name__ == "__main__":
    main()

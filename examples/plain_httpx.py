"""A streamed completion, placed by the router with plain HTTP requests; nothing of it is imported.

    kv-router up                                     # in another terminal
    pip install httpx
    python examples/plain_httpx.py --router http://127.0.0.1:8092 "What is a key-value cache?"

Four requests besides the completion: the tokens of the prompt, a booking, the first token, the end.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx


async def tokens_of(client: httpx.AsyncClient, engine_url: str, body: dict[str, Any]) -> list[int]:
    """Return the tokens of a completion's or a chat's prompt, as an engine makes them."""
    if isinstance(body.get("prompt"), list):
        return body["prompt"]
    answer = await client.post(f"{engine_url}/tokenize", json=body)
    return answer.raise_for_status().json()["tokens"]


async def completion(
    client: httpx.AsyncClient, router_url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed completion. Its booking ends with it, whatever happens."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    workers = (await client.get(f"{router_url}/workers")).raise_for_status().json()
    booking = {
        "token_ids": await tokens_of(client, workers[0]["endpoint"], body),
        "expected_output_tokens": body["max_tokens"],
    }
    answer = await client.post(f"{router_url}/select_and_reserve", json=booking)
    place = answer.raise_for_status().json()
    booked = f"{router_url}/reservations/{place['request_id']}"
    usage = None
    try:
        url = f"{place['endpoint']}/v1/completions"
        rank = {"x-data-parallel-rank": str(place["dp_rank"])}
        async with client.stream("POST", url, json=body, headers=rank) as stream:
            stream.raise_for_status()
            is_prefilled = False
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not is_prefilled:
                    is_prefilled = True
                    await client.post(f"{booked}/prefill_complete")
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                yield event
    finally:
        await client.request("DELETE", booked, json={"usage": usage})


async def main() -> None:
    """Read the command line, and print a completion as it comes."""
    parser = argparse.ArgumentParser(description="A completion, placed by the router.")
    parser.add_argument("prompt")
    parser.add_argument("--router", default="http://127.0.0.1:8092", help="its URL")
    parser.add_argument("--model", default="default", help="the engines' name of it")
    options = parser.parse_args()
    body = {"model": options.model, "prompt": options.prompt, "max_tokens": 64}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        aclosing(completion(client, options.router, body)) as events,
    ):
        async for event in events:
            print("".join(each["text"] for each in event["choices"]), end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())

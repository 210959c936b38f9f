"""Conversations through OpenAI's interface of a fleet where one worker computes a prompt, and
another answers it.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from msgspec import Struct

from router.local.demo import MAX_TOKENS, TYPING_S
from router.local.workload import Turn


class HandedOver(Struct, frozen=True):
    """What became of one request: the ids of both workers; `predicted_tokens` that who computed the
    prompt had cached, by the router, and `cached_tokens`, by its engine; `given_tokens` that who
    answered did not compute.
    """

    turn: Turn
    prefill_worker_id: int
    worker_id: int
    predicted_tokens: int
    cached_tokens: int
    given_tokens: int
    ttft_s: float


class PrefillDemo:
    """Asks whoever forwards."""

    def __init__(self, client: httpx.AsyncClient, openai_url: str) -> None:
        self._client = client
        self._url = f"{openai_url}/v1/completions"

    async def run(
        self, conversations: Sequence[Sequence[Turn]], tell: Callable[[HandedOver], None]
    ) -> list[HandedOver]:
        """One turn after the other; those that nobody else computed are left out."""
        handed_over = []
        for conversation in conversations:
            for turn in conversation:
                done = await self._turn(turn)
                if done is not None:
                    handed_over.append(done)
                    tell(done)
                await asyncio.sleep(TYPING_S)
        return handed_over

    async def _turn(self, turn: Turn) -> HandedOver | None:
        body = {
            "model": "default",
            "prompt": turn.token_ids,
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s, ttft_s, usage = time.perf_counter(), 0.0, None
        async with self._client.stream("POST", self._url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                ttft_s = ttft_s or time.perf_counter() - started_s
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
        return _handed_over(turn, answer.headers, usage, ttft_s)


def _handed_over(
    turn: Turn, headers: httpx.Headers, usage: dict[str, Any] | None, ttft_s: float
) -> HandedOver | None:
    if "x-prefill-worker-id" not in headers or usage is None:
        return None
    return HandedOver(
        turn,
        int(headers["x-prefill-worker-id"]),
        int(headers["x-worker-id"]),
        int(headers["x-prefill-predicted-cached-tokens"]),
        int(headers["x-prefill-cached-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s,
    )

"""Conversations through the OpenAI endpoint, and prompts forced to another worker."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from router.protocol.replies import BlockSource
from router.protocol.values import Rank
from router.tools.up.demo.demo import (
    MAX_TOKENS,
    Completion,
    ConversationTurn,
    Demo,
    run_conversations,
)


class EndpointRow(Struct, frozen=True):
    """The result of one request to the OpenAI endpoint.

    `predicted_tokens`: cached at the worker, as predicted by the router. `cached_tokens`: the same,
    as counted by the engine. `headers`: of the response.
    """

    turn: ConversationTurn
    worker_id: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    ttft_s: float
    headers: Mapping[str, str]


class HandedOver(Struct, frozen=True):
    """The result of one request with a remote prefill, with the ids of both workers.

    `predicted_tokens`: cached at the prefill worker, as predicted by the router. `cached_tokens`:
    the same, as counted by its engine. `given_tokens`: those that the decode worker did not
    compute.
    """

    turn: ConversationTurn
    prefill_worker_id: int
    worker_id: int
    predicted_tokens: int
    cached_tokens: int
    given_tokens: int
    ttft_s: float

    @classmethod
    def of(cls, row: EndpointRow) -> "HandedOver | None":
        """Return the hand-over of a request. Returns None if one worker did all of it."""
        headers = row.headers
        if "x-prefill-worker-id" not in headers:
            return None
        return cls(
            row.turn,
            int(headers["x-prefill-worker-id"]),
            row.worker_id,
            int(headers["x-prefill-predicted-cached-tokens"]),
            int(headers["x-prefill-cached-tokens"]),
            row.cached_tokens,
            row.ttft_s,
        )


class EndpointDemo:
    """A client of the OpenAI endpoint.

    `are_tokens`: prompts are sent as tokens of the byte-level model, not as text.
    """

    def __init__(
        self, client: httpx.AsyncClient, openai_url: str, model: str, *, are_tokens: bool
    ) -> None:
        self._client = client
        self._url = f"{openai_url}/v1/completions"
        self._model, self._are_tokens = model, are_tokens

    async def run(
        self,
        conversations: Sequence[Sequence[ConversationTurn]],
        tell: Callable[[EndpointRow], None],
        users: int,
    ) -> list[EndpointRow]:
        """Return the rows of all turns of `users` concurrent users.

        A prompt that is too long for the model ends its conversation. Raises httpx.HTTPError.
        """
        return await run_conversations(conversations, self._turn, tell, users)

    async def _turn(self, turn: ConversationTurn) -> EndpointRow | None:
        body = {
            "model": self._model,
            "prompt": turn.token_ids if self._are_tokens else turn.prompt,
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s, ttft_s, usage = time.perf_counter(), 0.0, None
        async with self._client.stream("POST", self._url, json=body) as answer:
            if answer.status_code == 400:
                return None
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                ttft_s = ttft_s or time.perf_counter() - started_s
                if line.startswith("data: {"):
                    usage = msgspec.json.decode(line[6:]).get("usage") or usage
        return _row(turn, answer.headers, usage or {}, ttft_s)


def _row(
    turn: ConversationTurn, headers: httpx.Headers, usage: Mapping[str, Any], ttft_s: float
) -> EndpointRow:
    details = usage.get("prompt_tokens_details") or {}
    return EndpointRow(
        turn,
        int(headers["x-worker-id"]),
        usage.get("prompt_tokens", 0),
        int(headers["x-predicted-cached-tokens"]),
        details.get("cached_tokens") or 0,
        ttft_s,
        headers,
    )


TOLD_S = 60.0
_POLL_S = 0.02


class Forced(Struct, frozen=True):
    """One prompt, computed at `source`, then run twice on `rank` without any of its blocks."""

    turn: ConversationTurn
    rank: Rank
    source: BlockSource
    alone: Completion
    """Without the source."""
    shared: Completion
    """With the source."""


class SharingDemo:
    """A client that forces prompts to other workers, in a fleet that shares blocks."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo

    async def run(
        self, turns: Sequence[ConversationTurn], tell: Callable[[Forced], None]
    ) -> list[Forced]:
        """Force each prompt from one worker to another, in turn. Raises TimeoutError."""
        ranks = sorted(await self._demo.look_around())
        first_of = {rank.worker_id: rank for rank in reversed(ranks)}
        pairs = itertools.cycle(itertools.permutations(first_of.values(), 2))
        forced = []
        for turn, (there, here) in zip(turns, pairs, strict=False):
            forced.append(await self._forced(turn, there, here))
            tell(forced[-1])
        return forced

    async def _forced(self, turn: ConversationTurn, there: Rank, here: Rank) -> Forced:
        """Compute a prompt on one rank, then run it on another."""
        await self._demo.forget_everything()
        await self._demo.complete(there, turn.token_ids)
        source = await self._source(turn, here)
        alone = await self._demo.complete(here, turn.token_ids)
        await self._demo.forget(here)
        shared = await self._demo.complete(here, turn.token_ids, source=source)
        return Forced(turn, here, source, alone, shared)

    async def _source(self, turn: ConversationTurn, here: Rank) -> BlockSource:
        """Return the router's block source, once it covers all blocks. Raises TimeoutError."""
        async with asyncio.timeout(TOLD_S):
            while True:
                decision = await self._demo.select(turn.token_ids, here.worker_id)
                full_blocks = decision.isl_tokens // decision.block_size
                if decision.source is not None and decision.source.blocks == full_blocks:
                    return decision.source
                await asyncio.sleep(_POLL_S)

"""The same conversations twice on the same fleet: placed round-robin, then by the router."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from statistics import mean, median, quantiles
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec import Struct

from router.protocol.replies import BlockSource, Decision
from router.protocol.values import Rank

T = TypeVar("T")

MAX_TURNS = 6


class ConversationTurn(Struct, frozen=True):
    """One request: the conversation so far, and the next message to the model."""

    conversation: str
    number: int
    prompt: str

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the byte-level model."""
        return list(self.prompt.encode())


def conversations() -> list[list[ConversationTurn]]:
    """Return the conversations of this package; each has at least two turns."""
    text = files("router.tools.up.demo").joinpath("conversations.json").read_text("utf-8")
    data = json.loads(text)
    return [
        _turns(each["title"], data["systems"][each["system"]], each["turns"])
        for each in data["conversations"]
    ]


def _turns(title: str, system: str, exchanges: list[dict[str, str]]) -> list[ConversationTurn]:
    said = f"{system}\n"
    turns = []
    for number, exchange in enumerate(exchanges[:MAX_TURNS], 1):
        said += f"\nUser: {exchange['user']}\nAssistant:"
        turns.append(ConversationTurn(title, number, said))
        said += f" {exchange['assistant']}"
    return turns


MAX_TOKENS = 4
PARALLEL_CONVERSATIONS = 4
TYPING_S = 0.1
_QUIET_S = 60.0
_POLL_S = 0.05


class Completion(Struct, frozen=True):
    """The outcome of one prompt at a rank. `usage`: its engine's report of it."""

    ttft_s: float
    usage: Mapping[str, Any]

    @property
    def cached_tokens(self) -> int:
        """The tokens of the prompt that the engine found cached."""
        cached_tokens: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached_tokens


class DemoRow(Struct, frozen=True):
    """The result of one request; `predicted_tokens` is None without a prediction."""

    turn: ConversationTurn
    rank: Rank
    prompt_tokens: int
    predicted_tokens: int | None
    cached_tokens: int
    ttft_s: float
    decision: Decision | None = None


class Summary(Struct, frozen=True):
    """Totals of a run."""

    prompt_tokens: int
    cached_tokens: int
    mean_ttft_s: float
    median_ttft_s: float
    p90_ttft_s: float

    @classmethod
    def of(cls, outcomes: Sequence[DemoRow]) -> "Summary":
        """Return sums and quantiles over at least two outcomes."""
        ttfts_s = [outcome.ttft_s for outcome in outcomes]
        return cls(
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            cached_tokens=sum(outcome.cached_tokens for outcome in outcomes),
            mean_ttft_s=mean(ttfts_s),
            median_ttft_s=median(ttfts_s),
            p90_ttft_s=quantiles(ttfts_s, n=10)[-1],
        )


class Demo:
    """A client that runs conversations against a fleet."""

    def __init__(self, client: httpx.AsyncClient, router_url: str) -> None:
        self._client = client
        self._router_url = router_url
        self._endpoints: dict[Rank, str] = {}
        self._request_numbers = itertools.count(1)
        self._run_id = f"{time.time_ns():x}"

    async def look_around(self) -> Mapping[Rank, str]:
        """Load and return the endpoint of each rank, in order."""
        workers = (await self._client.get(f"{self._router_url}/workers")).json()
        self._endpoints = {
            Rank(worker["worker_id"], rank["dp_rank"]): worker["endpoint"]
            for worker in workers
            for rank in worker["ranks"]
        }
        return self._endpoints

    async def attachments(self) -> list[str]:
        """Return what the router states of each engine that it attached by URL."""
        workers = (await self._client.get(f"{self._router_url}/workers")).json()
        return [worker["attachment"] for worker in workers if worker.get("attachment")]

    async def warm_up(self, prompt: str) -> None:
        """Run one request on each rank, so that first-time costs are not measured."""
        for rank in self._endpoints:
            await self.complete(rank, list(prompt.encode()))

    async def forget_everything(self) -> None:
        """Clear every cache, and wait until the router knows. Raises TimeoutError."""
        for endpoint in set(self._endpoints.values()):
            (await self._client.post(f"{endpoint}/reset_prefix_cache")).raise_for_status()
        async with asyncio.timeout(_QUIET_S):
            while await self._held_blocks():
                await asyncio.sleep(_POLL_S)

    async def round_robin(
        self, conversations: Sequence[Sequence[ConversationTurn]], tell: Callable[[DemoRow], None]
    ) -> list[DemoRow]:
        """Place the requests on the ranks in turn."""
        ranks = itertools.cycle(sorted(self._endpoints))

        async def place(turn: ConversationTurn) -> DemoRow:
            rank = next(ranks)
            done = await self.complete(rank, turn.token_ids)
            return DemoRow(turn, rank, len(turn.token_ids), None, done.cached_tokens, done.ttft_s)

        return await run_conversations(conversations, place, tell)

    async def by_router(
        self, conversations: Sequence[Sequence[ConversationTurn]], tell: Callable[[DemoRow], None]
    ) -> list[DemoRow]:
        """Place each request by the router, and report its progress to it."""
        return await run_conversations(conversations, self._place, tell)

    async def _place(self, turn: ConversationTurn) -> DemoRow:
        started_s = time.perf_counter()
        decision = await self._decide(turn)
        deciding_s = time.perf_counter() - started_s
        rank = Rank(decision.worker_id, decision.dp_rank)
        reservation = f"{self._router_url}/reservations/{decision.request_id}"

        async def first_token() -> None:
            await self._client.post(f"{reservation}/prefill_complete")

        report: dict[str, Any] = {}
        try:
            done = await self.complete(rank, turn.token_ids, first_token)
            report["usage"] = done.usage
        finally:
            await self._client.request("DELETE", reservation, json=report)
        return DemoRow(
            turn,
            rank,
            decision.isl_tokens,
            decision.predicted_cached_blocks * decision.block_size,
            done.cached_tokens,
            deciding_s + done.ttft_s,
            decision,
        )

    async def _decide(self, turn: ConversationTurn) -> Decision:
        body = {
            "token_ids": turn.token_ids,
            "request_id": f"demo-{self._run_id}-{next(self._request_numbers)}",
            "expected_output_tokens": MAX_TOKENS,
            "explain": True,
        }
        answer = await self._client.post(f"{self._router_url}/select_and_reserve", json=body)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=Decision)

    async def forget(self, rank: Rank) -> None:
        """Clear the caches of a rank's worker."""
        url = f"{self._endpoints[rank]}/reset_prefix_cache"
        (await self._client.post(url)).raise_for_status()

    async def select(self, token_ids: list[int], worker_id: int) -> Decision:
        """Return the router's decision with only one worker allowed."""
        body = {"token_ids": token_ids, "allowed_worker_ids": [worker_id]}
        answer = await self._client.post(f"{self._router_url}/select", json=body)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=Decision)

    async def complete(
        self,
        rank: Rank,
        token_ids: list[int],
        first_token: Callable[[], Awaitable[None]] | None = None,
        source: BlockSource | None = None,
    ) -> Completion:
        """Run one completion on this rank. `source`: another rank that has its blocks."""
        started_s = time.perf_counter()
        ttft_s = 0.0
        usage: dict[str, Any] = {}
        async for chunk in self._stream(rank, token_ids, source):
            if not ttft_s:
                ttft_s = time.perf_counter() - started_s
                if first_token is not None:
                    await first_token()
            usage = chunk.get("usage") or usage
        return Completion(ttft_s, usage)

    async def _stream(
        self, rank: Rank, token_ids: list[int], source: BlockSource | None
    ) -> AsyncIterator[dict[str, Any]]:
        url = f"{self._endpoints[rank]}/v1/completions"
        headers = {"x-data-parallel-rank": str(rank.dp_rank)}
        body: dict[str, Any] = {
            "prompt": token_ids,
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if source is not None:
            body["kv_transfer_params"] = {"source": msgspec.to_builtins(source)}
        async with self._client.stream("POST", url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)

    async def _held_blocks(self) -> int:
        workers = (await self._client.get(f"{self._router_url}/workers")).json()
        return sum(rank["held_blocks"] for worker in workers for rank in worker["ranks"])


async def run_conversations(
    conversations: Sequence[Sequence[ConversationTurn]],
    place: Callable[[ConversationTurn], Awaitable[T | None]],
    tell: Callable[[T], None],
    users: int = PARALLEL_CONVERSATIONS,
) -> list[T]:
    """Run the conversations of `users` concurrent users, each turn by turn.

    A conversation ends early where `place` returns None.
    """
    waiting = iter(conversations)
    outcomes: list[T] = []

    async def user() -> None:
        for conversation in waiting:
            for turn in conversation:
                outcome = await place(turn)
                if outcome is None:
                    break
                outcomes.append(outcome)
                tell(outcome)
                await asyncio.sleep(TYPING_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return outcomes

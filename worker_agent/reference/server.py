"""The agent's HTTP server: the engine's OpenAI interface, and the operators' routes."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.errors import InvalidFieldError
from router.protocol.values import Rank
from router.runtime.process.json_bodies import decode_body, read_body
from router.runtime.security.guarded import caller_of
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.config.reference import EngineSettings
from worker_agent.manager.control import TierControl
from worker_agent.operations.http import TierRoutes
from worker_agent.process.http import (
    Handler,
    answering,
    dump_response,
    json_response,
    metrics_response,
)
from worker_agent.reference.chat import ChatRequest, TokenizeRequest
from worker_agent.reference.completions import AgentResponse, CompletionRequest, checked
from worker_agent.reference.engine.batching import GenerationRequest, block_names
from worker_agent.reference.engine.engine import Generated
from worker_agent.reference.metrics import agent_metrics
from worker_agent.reference.runner import RankRunner
from worker_agent.reference.sharing import AgentSharing, HandingOver
from worker_agent.sharing.reports import SharingReport

T = TypeVar("T")
Tokens: TypeAlias = AsyncGenerator[Generated, None]

BODY_LIMIT_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
RANK_HEADER = "x-data-parallel-rank"


class EngineServer:
    """The handlers; `is_ready` returns whether the worker is announced to routers."""

    def __init__(
        self,
        worker_id: int,
        routing_group: str,
        config: EngineSettings,
        runners: Sequence[RankRunner],
        tiers: TierControl,
        is_ready: Callable[[], bool],
        sharing: AgentSharing | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._routing_group = routing_group
        self._config = config
        self._sharing = sharing
        self._tiers = TierRoutes(tiers)
        self._runners = {runner.rank.dp_rank: runner for runner in runners}
        self._is_ready = is_ready
        self._metrics = agent_metrics(config.model_name, config.block_size, runners, tiers, sharing)
        self._decode = msgspec.json.Decoder(CompletionRequest).decode
        self._decode_chat = msgspec.json.Decoder(ChatRequest).decode
        self._decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
        self._request_numbers = itertools.count(1)
        self._started_ns = time.time_ns()

    def app(self) -> Starlette:
        """Return the application."""
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/tokenize", self.tokenize),
            ("GET", "/v1/models", self.models),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/dump", self.dump),
            ("GET", "/blocksets", self.blocksets),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            *self._tiers.routes(),
        )
        return Starlette(
            routes=[Route(path, answering(handler), methods=[m]) for m, path, handler in routes]
        )

    async def completions(self, request: Request) -> Response:
        """Respond to an OpenAI completion."""
        return await self._answered(request, await _read(request, self._decode), is_chat=False)

    async def chat(self, request: Request) -> Response:
        """Respond to an OpenAI chat."""
        body = await _read(request, self._decode_chat)
        return await self._answered(request, body.completion, is_chat=True)

    async def tokenize(self, request: Request) -> Response:
        """Respond with the tokens of a text or a chat, in the format of vLLM's server."""
        tokens = (await _read(request, self._decode_tokenize)).tokens
        most = self._config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens})

    async def _answered(
        self, request: Request, body: CompletionRequest, *, is_chat: bool
    ) -> Response:
        caller = caller_of(request.scope)
        caller.check_group(self._routing_group)
        # The time and the usage of an answer show what is cached under its salt.
        caller.check_salt(body.cache_salt)
        runner = self._runner(request.headers.get(RANK_HEADER))
        request_id = f"{self._started_ns:x}-{next(self._request_numbers)}"
        generation = checked(body, self._config.model_name, self._config.max_model_len, request_id)
        source = await self._source(body, runner.rank)
        if source is not None:
            generation = replace(generation, source=source)
        answer = AgentResponse(body, generation, self._config.model_name, is_chat=is_chat)
        if body.stream:
            tokens = runner.generate(generation)
            return StreamingResponse(_stream(answer, tokens), media_type="text/event-stream")
        async with self._handing_over(body, runner, generation) as handing_over:
            if not await _is_generated(request, answer, runner.generate(generation)):
                return Response(status_code=499)
            hand_over = None if handing_over is None else await handing_over()
        return Response(answer.whole(hand_over), media_type="application/json")

    async def models(self, _: Request) -> Response:
        """Respond with the one model served."""
        model = {"id": self._config.model_name, "object": "model", "owned_by": "kv-router"}
        return json_response({"object": "list", "data": [model]})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Drop all cached prefixes of every rank."""
        for runner in self._runners.values():
            runner.clear_cache()
        return json_response({"status": "ok"})

    async def dump(self, _: Request) -> Response:
        """Respond with all blocks by rank and tier, including unpublished changes."""
        return dump_response(self._worker_id, list(self._runners.values()))

    async def blocksets(self, _: Request) -> Response:
        """Respond with the blocksets that are exported and imported; none without `share`."""
        return json_response(SharingReport() if self._sharing is None else self._sharing.report())

    async def health(self, _: Request) -> Response:
        """Respond that the process is alive."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Respond whether the worker is announced to routers; 503 otherwise."""
        is_ready = self._is_ready()
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Respond with Prometheus metrics."""
        return metrics_response(self._metrics)

    async def _source(self, body: CompletionRequest, rank: Rank) -> PeerSource | None:
        params = body.kv_transfer_params
        if params is None or params.source is None or self._sharing is None:
            return None
        return await self._sharing.source(params.source, rank, params.leased)

    @asynccontextmanager
    async def _handing_over(
        self, body: CompletionRequest, runner: RankRunner, request: GenerationRequest
    ) -> AsyncIterator[HandingOver | None]:
        """Hand over a prompt's blocks to the worker that decodes; None: it is this one."""
        params, sharing = body.kv_transfer_params, self._sharing
        if params is None or not params.do_remote_decode or sharing is None:
            yield None
            return
        size = self._config.block_size
        names = await asyncio.to_thread(block_names, request, size, sharing.naming)
        async with sharing.handing_over(names, runner.rank, runner.steps, params.target) as it:
            yield it

    def _runner(self, header: str | None) -> RankRunner:
        """Return the rank in the header, or the one with the fewest requests."""
        if header is None:
            return min(self._runners.values(), key=lambda runner: runner.request_count)
        is_number = header.isdecimal() and len(header) <= 20
        runner = self._runners.get(int(header)) if is_number else None
        if runner is None:
            allowed = ", ".join(str(rank) for rank in self._runners)
            raise InvalidFieldError(RANK_HEADER, repr(header[:64]), allowed)
        return runner


async def _read(request: Request, decode: Callable[[bytes], T]) -> T:
    raw = await read_body(request.stream(), BODY_LIMIT_BYTES, BODY_TIMEOUT_S)
    return await decode_body(decode, raw)


async def _stream(answer: AgentResponse, tokens: Tokens) -> AsyncGenerator[bytes, None]:
    async with aclosing(tokens):
        async for generated in tokens:
            yield answer.add(generated)
    yield answer.end()


async def _is_generated(request: Request, answer: AgentResponse, tokens: Tokens) -> bool:
    """Add all tokens; return False once the caller is gone."""
    async with aclosing(tokens):
        async for generated in tokens:
            answer.add(generated)
            if await request.is_disconnected():
                return False
    return True

"""What clients see: OpenAI's interface, and what every process of ours answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from router.errors import ClientGoneError, KvRouterError
from router.forward.answering import ClientSide
from router.forward.bodies import CHAT, COMPLETIONS, Asked, OpenAiPath, read_asked
from router.forward.config import ForwardConfig
from router.forward.errors import RouteNotFoundError
from router.forward.headers import Pairs
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.models import Models
from router.forward.placing import Placing, PromptTokens
from router.forward.push import Errand, Push
from router.forward.tokenizing import Tokenizing
from router.process.bodies import read_body
from router.process.request_ids import ANSWERED, TRACEPARENT, RequestIds
from router.process.request_ids import REQUEST_ID as ID_NAME
from router.protocol.requests import SelectRequest
from router.security.caller import Caller
from router.security.errors import TooManyRequestsError
from router.security.guard import Guard
from router.security.guarded import admit

Handler: TypeAlias = Callable[[ClientSide, Scope, Caller], Awaitable[Ended]]

ROUTES = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/models",
    "GET /health",
    "GET /ready",
    "GET /metrics",
)


class ForwardApp:
    """The ASGI application."""

    def __init__(
        self,
        config: ForwardConfig,
        push: Push,
        tokenizing: Tokenizing,
        models: Models,
        metrics: ForwardMetrics,
        guard: Guard,
    ) -> None:
        self._config = config
        self._push = push
        self._tokenizing = tokenizing
        self._models = models
        self._metrics = metrics
        self._guard = guard
        self._in_flight = 0
        self._placing = Placing(config.routing_group, config.mode == "direct", config.max_wait_s)
        handlers: tuple[Handler, ...] = (
            self._completions,
            self._chat,
            self._list_models,
            self._health,
            self._ready,
            self._tell_metrics,
        )
        self._handlers = dict(zip(ROUTES, handlers, strict=True))

    def reconfigure(self, config: ForwardConfig) -> None:
        """Go on with other limits, those of `reload.LIVE`."""
        self._config = config

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return self._in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        ids = _ids_of(scope["headers"])
        ANSWERED.set(ids)
        client = ClientSide(receive, send, [(ID_NAME.encode(), ids.request_id.encode())])
        self._in_flight += 1
        self._metrics.in_flight.inc()
        route = f"{scope['method']} {scope['path']}"
        try:
            ended = await self._answer(route, client, scope)
        except KvRouterError as error:
            self._metrics.refusals.labels(error.code).inc()
            ended = "refused" if error.http_status < 500 else "failed"
            await client.refuse(error)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()
        self._metrics.requests.labels(route if route in self._handlers else "", ended).inc()

    async def _answer(self, route: str, client: ClientSide, scope: Scope) -> Ended:
        if self._in_flight > self._config.max_requests and not self._is_open(scope):
            raise TooManyRequestsError(self._config.max_requests)
        caller = admit(self._guard, scope["method"], scope["path"], scope["headers"])
        handler = self._handlers.get(route)
        if handler is None:
            raise RouteNotFoundError(route, ROUTES)
        return await handler(client, scope, caller)

    def _is_open(self, scope: Scope) -> bool:
        return self._guard.is_open(scope["method"], scope["path"])

    async def _completions(self, client: ClientSide, scope: Scope, caller: Caller) -> Ended:
        return await self._forward(COMPLETIONS, client, scope["headers"], caller)

    async def _chat(self, client: ClientSide, scope: Scope, caller: Caller) -> Ended:
        return await self._forward(CHAT, client, scope["headers"], caller)

    async def _forward(
        self, path: OpenAiPath, client: ClientSide, headers: Pairs, caller: Caller
    ) -> Ended:
        limits = self._config
        body = await read_body(client.pieces(), limits.body_limit_bytes, limits.body_timeout_s)
        asked = read_asked(path, body)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(client.until_gone())
                ended = await self._placed(asked, headers, caller, client)
                watching.cancel()
        except* ClientGoneError:
            ended = "client_gone"
        except* KvRouterError as several:
            raise several.exceptions[0] from None
        return ended

    async def _placed(
        self, asked: Asked, headers: Pairs, caller: Caller, client: ClientSide
    ) -> Ended:
        tokens = await self._tokenizing.tokens(asked)
        request = self._placing.request(asked, headers, caller, tokens)
        if asked.extensions.is_query:
            return await self._told(asked, tokens, request, client)
        counted = len(tokens.token_ids) if tokens.are_counted else None
        prompt = tokens.token_ids if tokens.are_certain else None
        errand = Errand(asked, headers, request, _request_id(), counted, prompt)
        return await self._push.forward(errand, client)

    async def _told(
        self, asked: Asked, tokens: PromptTokens, request: SelectRequest, client: ClientSide
    ) -> Ended:
        """Where the request would go, and its tokens, so that they need not be found again."""
        decision = await self._push.router.select(request)
        prefill = await self._push.prefill.place(request)
        place = {"decode_worker_id": decision.worker_id, "decode_dp_rank": decision.dp_rank}
        if prefill is not None:
            place |= {"prefill_worker_id": prefill.worker_id, "prefill_dp_rank": prefill.dp_rank}
        said: dict[str, object] = {"worker_id": place, "overlap_blocks": decision.overlap_blocks}
        if tokens.are_certain:
            said["token_ids"] = tokens.token_ids
        kind = "chat.completion" if asked.path == CHAT else "text_completion"
        body = {"id": _request_id(), "object": kind, "model": asked.model, "choices": []}
        await client.json({**body, "nvext": said})
        return "query"

    async def _list_models(self, client: ClientSide, *_: object) -> Ended:
        await client.json(await self._models.listed())
        return "answered"

    async def _health(self, client: ClientSide, *_: object) -> Ended:
        await client.json({"status": "ok"})
        return "answered"

    async def _ready(self, client: ClientSide, *_: object) -> Ended:
        reason = await self._models.unready_reason()
        body: dict[str, object] = {"ready": reason is None, "reason": reason}
        body |= {"tokenizers": self._tokenizing.told()} if self._tokenizing.has_own else {}
        await client.json(body, 200 if reason is None else 503)
        return "answered"

    async def _tell_metrics(self, client: ClientSide, *_: object) -> Ended:
        kind = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        await client.whole(200, kind, self._metrics.exposition())
        return "answered"


def _ids_of(headers: Pairs) -> RequestIds:
    said = {name: value for name, value in headers if name in (b"x-request-id", b"traceparent")}
    names = (ID_NAME, TRACEPARENT)
    texts = [said[n.encode()].decode("latin-1") if n.encode() in said else None for n in names]
    return RequestIds(*texts)


def _request_id() -> str:
    ids = ANSWERED.get()
    assert ids is not None
    return ids.request_id

"""Tokenization by engines: which routes they have, what is asked there, and a cache of tokens."""

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import msgspec
from msgspec import Struct

from router.client import RouterClient, SelectRequest
from router.errors import KvRouterError
from router.forward.apis.api import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from router.forward.apis.chats.dialect import UNKNOWN, Dialect
from router.forward.metrics import ForwardMetrics
from router.forward.request_body import CompletionRequest
from router.forward.resilience.model_names import ModelNames
from router.forward.tokenizer.chats import read_messages
from router.forward.tokenizer.engine_client import (
    NOT_SERVED,
    EngineClient,
    Key,
    NoTokensError,
    Rendered,
)
from router.forward.tokenizer.token_cache import TokenCache, partition_key
from router.runtime.http_client import UpstreamError
from router.runtime.process.json_bodies import THREAD_BYTES

log = logging.getLogger(__name__)

ASK_AGAIN_S = 600.0
"""Time after which an engine is asked again what it is, and for routes that it did not have."""

ASK_UNKNOWN_AGAIN_S = 10.0
MOST_ENGINES = 4096

_OF_CHATS = (
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
)
_OF_TEXTS = ("add_special_tokens",)

_TO_RENDER: dict[str, tuple[str, ...]] = {
    CHAT: (*_OF_CHATS, "echo", "truncate_prompt_tokens", "media_io_kwargs"),
    MESSAGES: ("system", "messages", "tools", "tool_choice", "thinking", "output_config",
               "chat_template_kwargs"),
    RESPONSES: ("instructions", "input", "tools", "tool_choice", "reasoning", "text", "truncation",
                "chat_template_kwargs", "previous_response_id", "previous_input_messages",
                "prompt", "mm_processor_kwargs"),
}  # fmt: skip
_ALONE: dict[str, dict[str, Any]] = {MESSAGES: {"max_tokens": 1}, RESPONSES: {"store": False}}
_NO_MEDIA = {"mm_payload": "none", "return_mm_kwargs": False}
"""The request that a render leaves out the pictures themselves: vLLM from 0.32, and before."""


class Engine(Struct, frozen=True):
    """An engine of a model."""

    endpoint: str
    block_size: int


class Missing(Struct, frozen=True):
    """A route that an engine of this model does not serve. `status`: of its response."""

    model: str
    status: int
    until_s: float


class EngineTokens:
    """Tokens from engines; one engine of a model is asked, as long as it answers."""

    def __init__(
        self,
        router: RouterClient,
        client: EngineClient,
        metrics: ForwardMetrics,
        routing_group: str,
        known: TokenCache,
        names: ModelNames,
    ) -> None:
        self._router = router
        self._names = names
        self._client = client
        self._metrics = metrics
        self._routing_group = routing_group
        self._known = known
        self._secret = token_bytes(16)  # keyed, so that callers cannot construct collisions
        self._engines: dict[str, Engine] = {}
        self._dialects: dict[str, tuple[float, Dialect]] = {}
        self._missing: dict[tuple[str, str], Missing] = {}

    async def engine(self, model: str) -> Engine | None:
        """Return an engine of this model, from a selection of the router, or None."""
        engine = self._engines.get(model)
        if engine is None:
            group = self._routing_group
            request = SelectRequest(token_ids=[0], model_name=model, routing_group=group)
            try:
                decision = await self._router.select(self._names.resolved(request))
            except KvRouterError:
                return None
            engine = Engine(decision.endpoint, decision.block_size)
            _bounded(self._engines)[model] = engine
        return engine

    async def dialect(self, engine: Engine, key: Key) -> Dialect:
        """Return the rules of an engine."""
        until_s, dialect = self._dialects.get(engine.endpoint, (0.0, UNKNOWN))
        now_s = time.monotonic()
        if now_s < until_s:
            return dialect
        try:
            dialect = await self._client.dialect(engine.endpoint, key)
        except KvRouterError:
            dialect = UNKNOWN
        again_s = ASK_UNKNOWN_AGAIN_S if dialect is UNKNOWN else ASK_AGAIN_S
        _bounded(self._dialects)[engine.endpoint] = (now_s + again_s, dialect)
        return dialect

    async def tokenized(
        self, asked: CompletionRequest, partition: bytes, key: Key = None
    ) -> Sequence[int] | None:
        """Return the tokens of a text or a chat, or None if no engine provides them.

        Raises PromptRefusedError.
        """
        if asked.size_bytes > THREAD_BYTES:
            body, name = await asyncio.to_thread(self._question, asked, partition)
        else:
            body, name = self._question(asked, partition)
        known = self._known.get(name)
        self._count("asked" if known is None else "known")
        if known is not None:
            return known
        engine = await self.engine(asked.model)
        try:
            found = (
                [] if engine is None else await self._client.tokenize(engine.endpoint, body, key)
            )
        except KvRouterError:
            found = []
        if not found:
            self._forget(asked.model)
            return None
        tokens = array("I", found)
        self._known.put(name, tokens)
        return tokens

    async def rendered(self, asked: CompletionRequest, engine: Engine, key: Key) -> Rendered | None:
        """Return what an engine makes of a request, or None if it does not say that."""
        path = asked.path
        if not self._has(engine, path):
            return None
        if asked.size_bytes > THREAD_BYTES:
            body = await asyncio.to_thread(render_body, asked)
        else:
            body = render_body(asked)
        try:
            rendered = await self._client.render(engine.endpoint, path, body, key)
        except NoTokensError as error:
            self._note_missing(engine, path, error.status, asked.model)
            return None
        except UpstreamError as error:
            if error.problem == "malformed":
                self._note_missing(engine, path, 404, asked.model)
            return None
        except KvRouterError:
            return None
        self._count("rendered")
        return rendered

    async def counted(self, asked: CompletionRequest, engine: Engine, key: Key) -> int | None:
        """Return the number of tokens that an engine counts in Messages, or None."""
        if not self._has(engine, "count_tokens"):
            return None
        try:
            return await self._client.count(engine.endpoint, render_body(asked, {}), key)
        except NoTokensError as error:
            self._note_missing(engine, "count_tokens", error.status, asked.model)
        except KvRouterError:
            pass
        return None

    def closed_models(self) -> list[str]:
        """Return the models of which an engine has switched off that it renders prompts."""
        now_s = time.monotonic()
        missing = self._missing.values()
        return sorted({m.model for m in missing if m.status == 403 and m.until_s > now_s})

    def _question(self, asked: CompletionRequest, partition: bytes) -> tuple[bytes, bytes]:
        """Return the `/tokenize` body and its cache key. Raises PromptRefusedError."""
        if asked.path == CHAT:  # fails here for messages that no engine accepts
            read_messages(bytes(asked.fields["messages"]))
        body = question(asked)
        secret = partition_key(self._secret, partition)
        return body, blake2b(body, digest_size=16, key=secret).digest()

    def _has(self, engine: Engine, route: str) -> bool:
        missing = self._missing.get((engine.endpoint, route))
        return missing is None or time.monotonic() >= missing.until_s

    def _note_missing(self, engine: Engine, route: str, status: int, model: str) -> None:
        """Remember that an engine lacks a route; another refusal is about the request."""
        if status not in NOT_SERVED:
            return
        if status == 403 and model not in self.closed_models():
            log.warning(
                "engine of %r: /render is switched off (403): prompts are tokenized here or by "
                "/tokenize, and of prompts with images nothing from the first image on is taken as "
                "cached; start vLLM with --enable-scale-out", model,
            )  # fmt: skip
        until_s = time.monotonic() + ASK_AGAIN_S
        _bounded(self._missing)[engine.endpoint, route] = Missing(model, status, until_s)

    def _forget(self, model: str) -> None:
        self._engines.pop(model, None)
        self._count("failed")

    def _count(self, outcome: str) -> None:
        self._metrics.tokenizations.count(outcome)


def question(asked: CompletionRequest) -> bytes:
    """Return the body of a `/tokenize` request; equal prompts give equal bodies."""
    fields: dict[str, Any] = {"model": asked.model}
    names = _OF_TEXTS if asked.path == COMPLETIONS else _OF_CHATS
    fields |= {name: asked.fields[name] for name in names if name in asked.fields}
    if asked.path == COMPLETIONS:
        fields["prompt"] = asked.prompt
    return msgspec.json.encode(fields)


def render_body(asked: CompletionRequest, more: dict[str, Any] = _NO_MEDIA) -> bytes:
    """Return the body of a request for a prompt alone."""
    names = _TO_RENDER[asked.path]
    fields = {name: asked.fields[name] for name in names if name in asked.fields}
    alone = _ALONE.get(asked.path, {})
    return msgspec.json.encode({"model": asked.model, **fields, **alone, **more})


def _bounded(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a table, emptied if it is full: engines come and go, and clients make up models."""
    if len(table) >= MOST_ENGINES:
        table.clear()
    return table

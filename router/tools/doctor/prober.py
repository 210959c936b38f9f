"""A few small requests to an engine, and the events that they cause.

    plain twice   is any event published, and is any block reused?
    salted        does the event contain the salt, and are the blocks separate?
    chat          are the tokens of the events those of the chat template?

Every prompt begins with random words, so that none of its blocks is cached yet. Requests of other
clients do not disturb the result: only events with the prompt's own tokens count.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from router.discovery.attach.engine_server import ObservedServer, Server
from router.discovery.attach.proof import STEPS, completion, fresh_salt, fresh_tokens
from router.errors import ServerError
from router.publisher.engine_events.batch import EngineStored
from router.tools.doctor.observed_probe import Kind, ObservedProbe, ObservedRequest, announced

PROMPT_BLOCKS = 3
MIN_TOKENS = 13
EVENT_WAIT_S = 3.0
POLL_S = 0.05
DEFAULT_BLOCK_SIZE = 16
MIN_VARIETY = 12
"""The minimum of different tokens in a prompt, so that it is new."""


class Prober:
    """The sender of the requests; `stored` lists the events since the subscription began."""

    def __init__(
        self,
        server: Server,
        seen: ObservedServer,
        model: str,
        block_size: int | None,
        stored: Callable[[], Sequence[EngineStored]],
        rng: Random,
    ) -> None:
        self._server = server
        self._model = model
        self._max_len = seen.max_model_len or 2_048
        self._block_size = block_size or DEFAULT_BLOCK_SIZE
        self._stored = stored
        self._rng = rng
        self._before = 0
        self._salt = fresh_salt(rng, "doctor")

    async def run(self) -> ObservedProbe:
        """Send all requests, one after the other."""
        tokens = await self._plain_tokens()
        plain = await self._completion("plain", tokens)
        again = await self._completion("again", tokens)
        salted = await self._completion("salted", tokens, self._salt)
        requests = {"plain": plain, "again": again, "salted": salted}
        template_tokens = await self._chat(requests)
        return ObservedProbe(requests, self._salt, template_tokens)

    async def _plain_tokens(self) -> list[int]:
        least = max(PROMPT_BLOCKS * self._block_size + 1, MIN_TOKENS)
        wanted = min(least, self._max_len - STEPS)
        tokens = await self._tokenized({"prompt": self._words(wanted)}) or []
        return (
            tokens[:wanted]
            if _is_varied(tokens[:wanted], wanted)
            else fresh_tokens(self._rng, wanted)
        )

    async def _text(self, words: int) -> str:
        """Return a new text, even for a tokenizer with a small vocabulary."""
        text = self._words(words)
        if _is_varied(await self._tokenized({"prompt": text}) or [], words):
            return text
        body = {"model": self._model, "tokens": fresh_tokens(self._rng, words)}
        try:
            return str((await self._server.client.send("POST", "/detokenize", body)).get("prompt"))
        except ServerError:
            return text

    def _words(self, count: int) -> str:
        return " ".join(f"{self._rng.getrandbits(20):05x}" for _ in range(count))

    async def _chat(self, requests: dict[str, ObservedRequest]) -> int | None:
        text = await self._text(2 * self._block_size)
        messages = {"messages": [{"role": "user", "content": text}]}
        expected = await self._tokenized(messages)
        plain = await self._tokenized({"prompt": text})
        if expected is None or plain is None:
            return None
        body = {**messages, "max_tokens": STEPS, "temperature": 0}
        path = "/v1/chat/completions"
        requests["chat"] = await self._request("chat", path, expected, body)
        return len(expected) - len(plain)

    async def _tokenized(self, body: dict[str, Any]) -> list[int] | None:
        try:
            reply = await self._server.client.send(
                "POST", "/tokenize", {"model": self._model, **body}
            )
        except ServerError:
            return None
        tokens = reply.get("tokens")
        is_list = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if is_list else None

    async def _completion(
        self, kind: Kind, tokens: list[int], salt: str | None = None
    ) -> ObservedRequest:
        body = completion(tokens, self._model, salt)
        return await self._request(kind, "/v1/completions", tokens, body)

    async def _request(
        self,
        kind: Kind,
        path: str,
        tokens: list[int],
        body: dict[str, Any],
    ) -> ObservedRequest:
        if kind != "again":
            self._before = len(self._stored())
        hits = await self._server.cached_tokens()
        try:
            reply = await self._server.client.send("POST", path, {"model": self._model, **body})
        except ServerError as error:
            return ObservedRequest(kind, problem=error.reason)
        cached = _cached_tokens(reply)
        seen = await self._until_announced(kind, tokens)
        if cached is None and hits is not None:
            hits_now = await self._server.cached_tokens()
            cached = None if hits_now is None else round(hits_now - hits)
        return msgspec.structs.replace(seen, cached_tokens=cached)

    async def _until_announced(self, kind: Kind, tokens: list[int]) -> ObservedRequest:
        """Return the blocks published since the request; waits a while until all are."""
        ends_s = time.monotonic() + EVENT_WAIT_S
        while True:
            seen = announced(kind, tokens, self._stored()[self._before :])
            if seen.announced_blocks == seen.blocks > 0 or time.monotonic() > ends_s:
                return seen
            await asyncio.sleep(POLL_S)


def _is_varied(tokens: list[int], wanted: int) -> bool:
    """Return whether the tokens vary enough to be new with near certainty."""
    return len(tokens) >= wanted and len(set(tokens)) >= min(wanted, MIN_VARIETY)


def _cached_tokens(reply: dict[str, Any]) -> int | None:
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return cached if isinstance(cached, int) else None

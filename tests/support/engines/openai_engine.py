"""An engine with an OpenAI server, reduced to its cache: what a probe can see of it.

Its tokenizer gives every word a number; a chat's template adds a token before and one behind. It
can be made to misbehave, as engines do.
"""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import xxhash
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, listening
from support.engines.zmq_engines import Engine, stored
from support.processes.servers import free_port


class OpenAiEngine:
    """`knows_salt`: "yes", "unsaid" (its events do not name it) or "no"; `is_silent`: publishes
    nothing; `chat_shift`: the difference of a chat's tokens from those of /tokenize; `sources`: its
    answer to /kv_event_sources: its own sockets, or what is given; None: 404, as before vLLM 0.31;
    `key`: what /v1/models asks for; `given_keys`: the headers that it was sent.
    """

    def __init__(
        self,
        block_size=4,
        *,
        knows_salt="yes",
        is_silent=False,
        has_caching=True,
        reports_cached=True,
        chat_shift=0,
        num_gpu_blocks=1000,
        models=None,
        sources="own",
        port=None,
        key=None,
    ):
        self.key = key
        self.engine = Engine(topic="kv")
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.block_size = block_size
        self.knows_salt = knows_salt
        self.is_silent = is_silent
        self.has_caching = has_caching
        self.reports_cached = reports_cached
        self.chat_shift = chat_shift
        self.num_gpu_blocks = num_gpu_blocks
        self.models = models or [{"id": "m", "max_model_len": 512, "owned_by": "vllm"}]
        self.sources = sources
        self.hits = 0
        self.given_keys = set()
        self._held = set()

    @asynccontextmanager
    async def running(self):
        routes = [
            Route("/v1/models", self.list_models),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/kv_event_sources", self.event_sources),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        with self.engine, listening("127.0.0.1", self.port) as listener:
            server = HttpServer(Starlette(routes=routes), HttpLimits(max_connections=100))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    async def list_models(self, request):
        given = request.headers.get("authorization")
        self.given_keys.add(given)
        if self.key is not None and given != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return JSONResponse({"data": self.models})

    async def version(self, _):
        return JSONResponse({"version": "0.32.0"})

    async def event_sources(self, _):
        if self.sources is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        return JSONResponse(self.own_sources() if self.sources == "own" else self.sources)

    def own_sources(self):
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.engine.port}",
                "replay_endpoint": f"tcp://*:{self.engine.replay_port}",
                "topic": "kv",
            }
        }

    async def metrics(self, _):
        return PlainTextResponse(
            f'vllm:cache_config_info{{block_size="{self.block_size}",'
            f'enable_prefix_caching="{self.has_caching}",'
            f'num_gpu_blocks="{self.num_gpu_blocks}"}} 1.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}\n'
        )

    async def tokenize(self, request):
        body = await request.json()
        if "messages" in body:
            return JSONResponse({"tokens": self._chat_tokens(body, 0)})
        return JSONResponse({"tokens": words(body["prompt"])})

    async def completions(self, request):
        body = await request.json()
        return self._answer(body["prompt"], body.get("cache_salt"))

    async def chat(self, request):
        return self._answer(self._chat_tokens(await request.json(), self.chat_shift), None)

    def _chat_tokens(self, body, shift):
        tokens = [1, *words(body["messages"][0]["content"]), 2]
        return [token + shift for token in tokens]

    def _answer(self, tokens, salt):
        cached = self._cached_tokens(tokens, None if self.knows_salt == "no" else salt)
        self.hits += cached
        details = {"cached_tokens": cached} if self.reports_cached else None
        return JSONResponse({"usage": {"prompt_tokens_details": details}})

    def _cached_tokens(self, tokens, salt):
        """Like an engine: blocks found in front are reused, the others computed and kept."""
        size = self.block_size
        blocks = range(len(tokens) // size)
        names = [_name(tokens[: (i + 1) * size], salt) for i in blocks]
        first = next((i for i in blocks if names[i] not in self._held), len(names))
        if self.has_caching:
            self._held.update(names)
        if first < len(names) and self.has_caching and not self.is_silent:
            self._publish(tokens, salt, names, first)
        return min(first, (len(tokens) - 1) // size) * size

    def _publish(self, tokens, salt, names, first):
        size, keys = self.block_size, {}
        if salt and self.knows_salt == "yes" and not first:
            keys = {"extra_keys": [[salt], *([None] * (len(names) - 1))]}
        told = tokens[first * size : len(names) * size]
        parent = names[first - 1] if first else None
        event = stored(names[first:], told, parent, size, lora_name=None, **keys)
        self.engine.publish(event)


def words(text):
    return [10 + xxhash.xxh32_intdigest(word.encode()) % 30_000 for word in text.split()]


def _name(prefix, salt):
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([prefix, salt]))

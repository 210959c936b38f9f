"""An engine with an OpenAI server, reduced to its cache: what a probe can see of it.

Its tokenizer gives every word a number; a chat's template adds a token before and one behind. It
can be made to misbehave, as engines do.
"""

import asyncio
from contextlib import ExitStack, asynccontextmanager

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
    `key`: what /v1/models asks for; `given_keys`: the headers that it was sent; `ranks`: their
    publishers, of which `engine` is the first; `silent_ranks`: those that publish nothing;
    `started_s`: of its process, None: not said; `routes`: those of /openapi.json, None: not served;
    `extra_fields`: of its stored events; `server_info`, `metrics_text`: its answers there.
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
        ranks=1,
        silent_ranks=(),
        version="0.32.0",
        fingerprint=None,
        started_s=None,
        routes=None,
        extra_fields=None,
        has_replay=True,
        events_port=None,
        server_info=None,
        metrics_text=None,
        host="127.0.0.1",
    ):
        self.host = host
        self.key = key
        self.ranks = [
            Engine(
                (events_port or free_port()) - rank,
                free_port() - rank,
                topic="kv",
                dp_rank=rank,
                has_replay=has_replay,
                host=host,
            )
            for rank in range(ranks)
        ]
        self.engine = self.ranks[0]
        self.silent_ranks = silent_ranks
        self.version_text = version
        self.fingerprint = fingerprint
        self.started_s = started_s
        self.routes = routes
        self.extra_fields = extra_fields or {}
        self.server_info = server_info
        self.metrics_text = metrics_text
        self.prompt_tokens = 0
        self.completions_served = 0
        self.withheld = []
        self.port = port or free_port()
        self.url = f"http://{host}:{self.port}"
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
        self._held = [set() for _ in range(ranks)]

    @asynccontextmanager
    async def running(self):
        routes = [
            Route("/v1/models", self.list_models),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
            Route("/server_info", self.info),
            Route("/metrics", self.metrics),
            Route("/kv_event_sources", self.event_sources),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(rank)
            listener = stack.enter_context(listening(self.host, self.port))
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
        return JSONResponse({"version": self.version_text})

    async def info(self, _):
        return JSONResponse(self.server_info or {}, status_code=200 if self.server_info else 404)

    async def openapi(self, _):
        if self.routes is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        return JSONResponse({"paths": {route: {} for route in self.routes}})

    async def event_sources(self, _):
        if self.sources is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        return JSONResponse(self.own_sources() if self.sources == "own" else self.sources)

    def own_sources(self):
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{each.port + each.dp_rank}",
                "replay_endpoint": f"tcp://*:{each.replay_port + each.dp_rank}"
                if each.has_replay
                else None,
                "topic": "kv",
            }
            for rank, each in enumerate(self.ranks)
        }

    async def metrics(self, _):
        if self.metrics_text is not None:
            return PlainTextResponse(self.metrics_text)
        started = ""
        if self.started_s is not None:
            started = f"process_start_time_seconds {self.started_s}\n"
        model = self.models[0]["id"]
        running = "".join(
            f'vllm:num_requests_running{{engine="{rank}",model_name="{model}"}} 0.0\n'
            for rank in range(len(self.ranks))
        )
        return PlainTextResponse(
            f"{started}{running}"
            f'vllm:prompt_tokens_total{{engine="0"}} {float(self.prompt_tokens)}\n'
            f'vllm:cache_config_info{{block_size="{self.block_size}",'
            f'enable_prefix_caching="{self.has_caching}",'
            f'kv_cache_size_tokens="{self.num_gpu_blocks * self.block_size}"}} 1.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}\n'
        )

    async def tokenize(self, request):
        body = await request.json()
        if "messages" in body:
            return JSONResponse({"tokens": self._chat_tokens(body, 0)})
        return JSONResponse({"tokens": words(body["prompt"])})

    async def completions(self, request):
        body = await request.json()
        rank = int(request.headers.get("x-data-parallel-rank", "0"))
        return self._answer(body["prompt"], body.get("cache_salt"), rank)

    async def chat(self, request):
        return self._answer(self._chat_tokens(await request.json(), self.chat_shift), None)

    def _chat_tokens(self, body, shift):
        tokens = [1, *words(body["messages"][0]["content"]), 2]
        return [token + shift for token in tokens]

    def _answer(self, tokens, salt, rank=0):
        cached = self._cached_tokens(tokens, None if self.knows_salt == "no" else salt, rank)
        self.hits += cached
        self.prompt_tokens += len(tokens)
        self.completions_served += 1
        details = {"cached_tokens": cached} if self.reports_cached else None
        usage = {"prompt_tokens_details": details}
        return JSONResponse({"usage": usage, "system_fingerprint": self.fingerprint})

    def _cached_tokens(self, tokens, salt, rank):
        """Like an engine: blocks found in front are reused, the others computed and kept."""
        size = self.block_size
        blocks = range(len(tokens) // size)
        names = [_name(tokens[: (i + 1) * size], salt) for i in blocks]
        held = self._held[rank]
        first = next((i for i in blocks if names[i] not in held), len(names))
        if self.has_caching:
            held.update(names)
        if first < len(names) and self.has_caching:
            event = self._event(tokens, salt, names, first)
            if self.is_silent or rank in self.silent_ranks:
                self.withheld.append((rank, event))
            else:
                self.ranks[rank].publish(event)
        return min(first, (len(tokens) - 1) // size) * size

    def release(self):
        """Publish what was withheld."""
        for rank, event in self.withheld:
            self.ranks[rank].publish(event)

    def _event(self, tokens, salt, names, first):
        size, keys = self.block_size, dict(self.extra_fields)
        if salt and self.knows_salt == "yes" and not first:
            keys["extra_keys"] = [[salt], *([None] * (len(names) - 1))]
        stored_tokens = tokens[first * size : len(names) * size]
        parent = names[first - 1] if first else None
        return stored(names[first:], stored_tokens, parent, size, lora_name=None, **keys)


def words(text):
    return [10 + xxhash.xxh32_intdigest(word.encode()) % 30_000 for word in text.split()]


def _name(prefix, salt):
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([prefix, salt]))

"""An engine that tokenises as a test wants, and answers everything with one usage."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.request_body import read_completion_request
from router.forward.tokenizer.errors import PromptRefusedError
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, listening
from support.processes.servers import eventually, free_port


class TokenizingEngine:
    """`tokenizer`: a LocalTokenizer, or None for one without `/tokenize`; `front`: tokens that it
    puts before every prompt; `refuses`: it understands no chat; `hangs`: `/tokenize` never answers.
    """

    def __init__(self, tokenizer, front=(), refuses=False, block_size=4, hangs=False):
        self.tokenizer = tokenizer
        self.front = list(front)
        self.refuses = refuses
        self.hangs = hangs
        self.block_size = block_size
        self.is_well = True
        self.asked = []
        self.probed = self.began = 0
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self):
        routes = [
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            Route(COMPLETIONS, self.answer, methods=["POST"]),
            Route(CHAT, self.answer, methods=["POST"]),
        ]
        if self.tokenizer is not None:
            routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        with listening("127.0.0.1", self.port) as listener:
            server = HttpServer(Starlette(routes=routes), HttpLimits(max_connections=100))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    async def metrics(self, _):
        return PlainTextResponse(f'vllm:cache_config_info{{block_size="{self.block_size}"}} 1.0\n')

    async def health(self, _):
        self.probed += 1
        return JSONResponse({}, 200 if self.is_well else 503)

    async def _is_free(self, request):
        return not self.hangs or await request.is_disconnected()

    async def tokenize(self, request):
        self.began += 1
        body = await request.body()
        await eventually(lambda: self._is_free(request))
        is_chat = "messages" in msgspec.json.decode(body)
        self.asked.append(body)
        if is_chat and self.refuses:
            return JSONResponse({}, 400)
        try:
            _, tokens = self.tokenizer.tokens(
                read_completion_request(CHAT if is_chat else COMPLETIONS, body)
            )
        except PromptRefusedError:
            return JSONResponse({}, 400)
        return JSONResponse({"tokens": self.front + tokens})

    async def answer(self, request):
        usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
        return JSONResponse({"choices": [{"index": 0, "text": "hi"}], "usage": usage})

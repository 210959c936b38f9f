"""Sentences about servers at a URL, engines or not: one router before a server of each kind."""

import asyncio
import gzip
import re
import ssl
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from router.discovery.attach.engine_client import MOST_BYTES
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, listening
from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.certificates import Authority
from support.processes.servers import eventually, free_port

SGLANG_METRICS = (
    'sglang:num_running_reqs{dp_rank="0",model_name="q"} 0\n'
    'sglang:cache_config_info{page_size="64",num_pages="9000"} 1.0\n'
)
SGLANG_EVENTS = {"publisher": "zmq", "endpoint_port_base": 5657, "load_endpoint_port_base": 5757}
SGLANG = {"models": [{"id": "q", "owned_by": "sglang"}], "metrics_text": SGLANG_METRICS}
SOURCE = {"enable_kv_cache_events": True, "publisher": "zmq"}


class Stranger:
    """A server that answers every request alike, and keeps the paths that it was asked for."""

    def __init__(self, response, tls=None):
        self._response, self._tls = response, tls
        self.port, self.paths = free_port(), set()
        self.url = f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self):
        async def answer(request):
            self.paths.add(request.url.path)
            return self._response

        app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
        with listening("127.0.0.1", self.port) as listener:
            server = HttpServer(app, HttpLimits(max_connections=100), self._tls)
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving


def engines():
    """Engines, each with what its sentence must match."""
    return [
        (OpenAiEngine(), r"vLLM 0\.32\.0, m, .*; events with replay; proved by a request"),
        (OpenAiEngine(ranks=2), r"2 ranks of 1000 .* by a request to each rank"),
        (OpenAiEngine(has_replay=False), r"but no replay: .* add replay_endpoint"),
        (OpenAiEngine(sources={}), r"no KV events: restart it with --kv-events-config"),
        (OpenAiEngine(has_caching=False), r"prefix caching is off"),
        (
            OpenAiEngine(sources={"0": {**SOURCE, "endpoint": "tcp://router.example:5557"}}),
            r"names 'tcp://router\.example:5557', which is not at 127\.0\.0\.1: it connects there",
        ),
        (
            OpenAiEngine(sources={"0": {**SOURCE, "endpoint": "ipc:///run/kv"}}),
            r"ipc:///run/kv can be read on its own machine only",
        ),
        (OpenAiEngine(key="k"), r"401: needs a key for /v1 .*events and metrics are open"),
        (
            OpenAiEngine(sources={}, routes=["/v1/embeddings"]),
            r"embeddings and scores of 'm': passed on by load",
        ),
        (
            OpenAiEngine(
                sources=None, models=[{"id": "l", "owned_by": "llamacpp"}], metrics_text=""
            ),
            r"llama\.cpp 0\.32\.0, l, .*no KV events are known of it",
        ),
        (
            OpenAiEngine(sources=None, models=[{"id": "t", "owned_by": "tensorrt_llm"}]),
            r"TensorRT-LLM 0\.32\.0, t, .*does not name its event sockets; name them: http",
        ),
        (
            OpenAiEngine(server_info={"kv_events": None}, **SGLANG),
            r"no KV events: .*'\{\"publisher\"",
        ),
        (
            OpenAiEngine(server_info={"kv_events": SGLANG_EVENTS}, **SGLANG),
            r"q, 1 rank of 9000 blocks of 64 tokens; events, but no replay, load socket",
        ),
        (OpenAiEngine(version="0.40.0"), r"degraded: vLLM 0\.40 has not been tested"),
    ]


def strangers(tls):
    """Other servers, each with what its sentence must match."""
    packed = gzip.compress(bytes(MOST_BYTES + 1), 1)
    large = Response(packed, headers={"content-encoding": "gzip"})
    nginx = Response(status_code=404, headers={"server": "nginx"})
    return [
        (Stranger(nginx), r"answers, but is no engine \(GET /v1/models: 404, server: .*nginx"),
        (Stranger(HTMLResponse("<html>")), r"is no engine \(GET /v1/models: 200, text/html"),
        (Stranger(RedirectResponse("http://127.0.0.1:1/")), r"which is not followed \(307\)"),
        (Stranger(Response(status_code=503)), r"is not ready \(503\); retrying each second"),
        (Stranger(Response(status_code=401)), r"401: needs a key for /v1 \(worker_token_file"),
        (Stranger(large), r"more than \d+ bytes"),
        (Stranger(Response(), tls), r"speaks TLS: https://\?"),
    ]


async def test_each_server_is_described(tmp_path):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*Authority(tmp_path).issue("server"))
    cases = [*engines(), *strangers(tls)]
    plain = Stranger(Response(status_code=404))
    expected = {server.url: pattern for server, pattern in cases}
    expected[f"http://127.0.0.1:{free_port()}"] = r"not up yet: nothing listens there"
    expected[plain.url.replace("http:", "https:")] = r"does not speak TLS: http://\?"
    async with AsyncExitStack() as stack:
        for server in (*(each for each, _ in cases), plain):
            await stack.enter_async_context(server.running())
        router = DirectRouter(workers=",".join(expected))
        router = await stack.enter_async_context(router.running())
        wrong = {}

        async def all_match():
            views = (await router.client.get("/workers")).json()
            said = {each["endpoint"]: each["attachment"] or "" for each in views}
            wrong.clear()
            wrong.update(
                {p: said.get(u) for u, p in expected.items() if not re.search(p, said.get(u, ""))}
            )
            return not wrong

        try:
            await eventually(all_match, timeout_s=30)
        except TimeoutError:
            assert wrong == {}


async def test_redirect_is_not_followed():
    target = Stranger(PlainTextResponse("{}"))
    async with target.running():
        stranger = Stranger(RedirectResponse(f"{target.url}/v1/models"))
        async with stranger.running(), DirectRouter().running() as router:
            answer = await router.post("/workers", {"endpoint": stranger.url})
            assert "not followed (307)" in answer.json()["attachment"]
            assert target.paths == set()


async def test_sockets_on_another_host_need_the_setting():
    sources = {"0": {**SOURCE, "endpoint": "tcp://127.7.7.7:5599", "topic": "kv"}}
    engine = OpenAiEngine(sources=sources)
    fields = {"workers": engine.url, "prove_workers": False}
    async with engine.running():
        for follows in (False, True):
            router = DirectRouter(workers_on_other_hosts=follows, **fields)
            async with router.running() as router:

                async def endpoints(router=router):
                    for worker in (await router.client.get("/workers")).json():
                        if worker["attachment"]:
                            return [worker["kv_events_endpoints"]]
                    return None

                found = await eventually(endpoints)
                assert found == ([{"0": "tcp://127.7.7.7:5599"}] if follows else [{}])

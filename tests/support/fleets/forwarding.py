"""An OpenAI endpoint, in this process: before a real router or inside it, and engines that obey."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

from router.forward.config import ForwardConfig
from router.forward.service import ForwardService
from router.protocol.values import Tier
from router.runtime.process.settings import configured
from support.engines.engines import names
from support.engines.upstreams import Upstream
from support.processes.running import RunningRouter, RunningService
from support.processes.servers import eventually, free_port

COMPLETION = {"model": "default", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}


# Health probes would be requests that no test has sent.
QUIET = {"idle_timeout_s": 60.0, "probe_interval_s": 0.0, "connect_timeout_s": 60.0}


class RunningEndpoint(RunningService):
    """An endpoint on `port` of `service`."""

    def __init__(self, service, port):
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        super().__init__(service, port)

    async def complete(self, path="/v1/completions", headers=None, **fields):
        return await self.post(path, {**COMPLETION, **fields}, headers=headers or {})

    async def until_ended(self, how, route="POST /v1/completions"):
        """Until one request has ended so."""
        line = f'kv_router_forward_requests_total{{ended="{how}",route="{route}"}}'

        async def has_ended():
            return await self.metric(line) == 1

        await eventually(has_ended)


class RunningForward(RunningEndpoint):
    """Started on `router`, a URL."""

    def __init__(self, router_url, **fields):
        port = free_port()
        settings = {"drain_s": 0.0, **QUIET, **fields}
        config = configured(ForwardConfig, router_url=router_url, http_port=port, **settings)
        super().__init__(ForwardService(config), port)


class Scene:
    """A router, a process that forwards, and engines by worker id."""

    def __init__(self, router, forward):
        self.router = router
        self.forward = forward
        self.engines, self.workers = {}, {}

    @classmethod
    @asynccontextmanager
    async def of(cls, nats_url, scripts, router_fields=None, roles=None, shared=None, **fields):
        """`roles`: of workers, by id; the others are aggregated. `shared`: where the only rank of a
        worker gives blocks, by id.
        """
        async with RunningRouter(nats_url, **(router_fields or {})).running() as router:
            forward = RunningForward(str(router.client.base_url), **fields)
            scene = cls(router, forward)
            async with forward.running(), scene.with_engines(scripts, roles, shared):
                yield scene

    @classmethod
    @asynccontextmanager
    async def in_router(cls, nats_url, scripts, router_fields=None, roles=None, **fields):
        """The same with the endpoint in the router's process."""
        port = free_port()
        settings = {**QUIET, **(router_fields or {}), **fields}
        running = RunningRouter(nats_url, openai_port=port, **settings)
        async with running.running() as router:
            endpoint = RunningEndpoint(router.service, port)
            scene = cls(router, endpoint)
            async with endpoint.client, scene.with_engines(scripts, roles):
                yield scene

    @asynccontextmanager
    async def with_engines(self, scripts, roles, shared=None):
        async with AsyncExitStack() as stack:
            for worker_id, script in scripts.items():
                engine = await stack.enter_async_context(Upstream(script).running())
                self.engines[worker_id] = engine
                role = (roles or {}).get(worker_id, "aggregated")
                at = {0: shared[worker_id]} if shared and worker_id in shared else {}
                fields = {"endpoint": engine.url, "role": role, "block_addresses": at}
                worker = await self.router.worker(worker_id, **fields)
                self.workers[worker_id] = worker
            yield

    async def holds(self, worker_id, prompt):
        """Let a worker hold a prompt's blocks, and receive no requests."""
        worker = self.workers[worker_id]
        [journal] = worker.journals.values()
        journal.stored(Tier.DEVICE, names(prompt), None)
        await worker.deliver()
        order = {"lifecycle": "cordoned"}
        await self.router.client.patch(f"/workers/{worker_id}", json=order)

        async def is_known():
            view = await self.router.view(worker_id)
            is_cordoned = view["lifecycle"] == "cordoned"
            return is_cordoned and view["ranks"][0]["held_blocks"] == len(names(prompt))

        await eventually(is_known)

    async def active_requests(self):
        loads = (await self.router.client.get("/loads")).json()
        return sum(rank["active_requests"] for scope in loads for rank in scope["loads"])

    async def until_free(self):
        """No reservation survives its request."""

        async def is_free():
            return await self.active_requests() == 0

        await eventually(is_free)

    def asked(self, worker_id):
        """The bodies that an engine was sent."""
        return [json.loads(body) for _, body in self.engines[worker_id].requests if body]


def lines(text):
    """The data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]

"""The endpoint in a router's process, before engines with the APIs of agents."""

from contextlib import AsyncExitStack, asynccontextmanager

from support.fleets.forwarding import QUIET, RunningEndpoint
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port

SYSTEM = "You are a helpful assistant who answers in numbers. " * 3
HELLO = [{"role": "user", "content": "Count, please, as far as you can."}]
PARAMETERS = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "Does it", "parameters": PARAMETERS}

BODIES = {
    "/v1/completions": {"prompt": SYSTEM, "max_tokens": 5},
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": SYSTEM}, *HELLO],
        "tools": [{"type": "function", "function": FUNCTION}],
        "reasoning_effort": "none",
        "max_tokens": 5,
    },
    "/v1/responses": {
        "instructions": SYSTEM,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Count."}]}],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": HELLO,
        "tools": [{"name": "f", "description": "Does it", "input_schema": PARAMETERS}],
        "max_tokens": 5,
    },
}
"""A request to each API, with a system prompt and tools."""


def body_of(path, **fields):
    return {"model": "m", **BODIES[path], **fields}


class AgentScene:
    """`forward`: the endpoint; `engines`: by worker id."""

    def __init__(self, router, forward, engines):
        self.router = router
        self.forward = forward
        self.engines = engines

    async def exact(self, worker_id):
        view = await self.router.view(worker_id)
        return view is not None and view["ranks"][0]["trust"]["state"] == "exact"

    async def until_free(self):
        async def is_free():
            loads = (await self.router.client.get("/loads")).json()
            ranks = [rank for scope in loads for rank in scope["loads"]]
            return sum(rank["active_requests"] for rank in ranks) == 0

        await eventually(is_free)

    async def booked(self):
        loads = (await self.router.client.get("/loads")).json()
        return [rank for scope in loads for rank in scope["loads"] if rank["active_requests"]]

    async def predicted(self, path, body):
        """The cached tokens that were predicted, and those that the engine reports."""
        answer = await self.forward.post(path, body)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-predicted-cached-tokens"]), cached_in(answer.json())

    async def until_heard(self):
        """Until the router knows every block of the engines."""

        async def has_all():
            for worker_id, engine in self.engines.items():
                (rank,) = (await self.router.view(worker_id))["ranks"]
                if rank["held_blocks"] != engine.held_blocks:
                    return False
            return True

        await eventually(has_all, poll_s=0.005)


def cached_in(answer):
    usage = answer["usage"]
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return usage[name]["cached_tokens"]
    return usage["cache_read_input_tokens"]


@asynccontextmanager
async def agent_scene(nats_url, *engines, headers=None, **fields):
    """Engines are workers 1, 2, … of the model `m`. `headers`: of requests to the router."""
    port = free_port()
    running = RunningRouter(nats_url, openai_port=port, **{**QUIET, **fields})
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running.running())
        router.client.headers.update(headers or {})
        forward = RunningEndpoint(router.service, port)
        await stack.enter_async_context(forward.client)
        its = AgentScene(router, forward, dict(enumerate(engines, 1)))
        for worker_id, engine in its.engines.items():
            await stack.enter_async_context(engine.running())
            added = await router.post("/workers", engine.registration(worker_id))
            assert added.status_code < 300, added.text
            await eventually(lambda worker_id=worker_id: its.exact(worker_id))
        yield its

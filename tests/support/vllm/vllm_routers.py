"""Routers as processes of their own, attached to engines in the two ways there are."""

from support.processes.processes import Process
from support.processes.servers import NatsServer, free_port
from support.vllm.vllm_engines import BLOCK_SIZE, MODEL_NAME, NUM_BLOCKS
from support.vllm.vllm_placing import AskedRouter


class _Processes(AskedRouter):
    """A router and what belongs to it, each with its output in the folder."""

    def __init__(self, directory, name):
        self.port = free_port()
        super().__init__(name, f"http://127.0.0.1:{self.port}")
        self._directory = directory
        self._processes = []

    def _run(self, label, module, command, **options):
        label = f"{self.name}-{label}"
        self._processes.append(Process(self._directory, label, module, command, **options))

    async def restart(self):
        """All of it killed, and started on what it has kept."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.start()
        await self.until_up()

    def close(self):
        for process in self._processes:
            process.end()


class DirectRouter(_Processes):
    """Reads the engines' sockets itself: no agent, no bus."""

    def __init__(self, directory, name="direct"):
        super().__init__(directory, name)
        options = {"http-port": self.port, "data-dir": directory / f"{name}-data", "drain-s": 0}
        self._run("router", "router", "serve", **options)

    async def attach(self, engines, **fields):
        await self.until_up()
        for worker_id, engine in engines.items():
            registration = {
                "worker_id": worker_id, "model_name": MODEL_NAME, "endpoint": engine.url,
                "kv_events_endpoints": {"0": engine.events},
                "replay_endpoints": {"0": engine.replay}, "topic": "kv@",
                "block_size": BLOCK_SIZE, "total_kv_blocks": NUM_BLOCKS,
                "max_num_batched_tokens": 2048,
            }  # fmt: skip
            await self.call("POST", "/workers", **registration | fields)
        await self.until_exact(engines)


class AttachedRouter(_Processes):
    """Attaches engines by their URLs, with an OpenAI endpoint in its process.

    `options`: of `kv-router serve`.
    """

    def __init__(self, directory, engines, name="attached", **options):
        super().__init__(directory, name)
        self.openai_port = free_port()
        self.openai_url = f"http://127.0.0.1:{self.openai_port}"
        urls = ",".join(engine.url for engine in engines)
        ports = {"http-port": self.port, "openai-port": self.openai_port}
        self._run("router", "router", "serve", workers=urls, **ports, **{"drain-s": 0}, **options)

    async def workers(self):
        """The views of all workers, by URL."""
        return {view["endpoint"]: view for view in await self.call("GET", "/workers")}


class BridgedRouter(_Processes):
    """A router that gets the engines' events on a bus, from an agent beside each."""

    def __init__(self, directory, name="agents"):
        super().__init__(directory, name)
        self._nats = NatsServer(directory / f"{name}-nats")
        self._nats.start()
        options = {"nats-url": self._nats.url, "http-port": self.port, "drain-s": 0}
        self._run("router", "router", "serve", name="router", **options)

    async def attach(self, engines):
        await self.until_up()
        for worker_id, engine in engines.items():
            options = {
                "nats-url": self._nats.url, "worker-id": worker_id, "endpoint": engine.url,
                "zmq": engine.events, "replay": engine.replay, "topic": "kv@",
                "metrics-url": f"{engine.url}/metrics", "state-dir": self._directory,
            }  # fmt: skip
            self._run(engine.name, "worker_agent", "run", engine="vllm", **options)
        await self.until_exact(engines)

    def close(self):
        super().close()
        self._nats.kill()

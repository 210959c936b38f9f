"""Real vLLM servers on the CPU, each with a cache so small that it evicts.

Engines run under a Python of their own, for they need packages that nothing else here needs.
"""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from support.processes.servers import NO_TLS, free_port, until

MODEL_NAME = "tiny"
BLOCK_SIZE = 32
NUM_BLOCKS = 80
"""In a cache; one of them is vLLM's null block, which holds nothing."""

ROOT = Path(__file__).parents[3]
START_S = 300.0
REQUEST_S = 60.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(name: str, model: Path, *arguments: Any) -> dict[str, Any]:
    """Return what a run of `vllm_runs` answers."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    program = ROOT / "tests/support/vllm/vllm_runs.py"
    command = [os.environ["VLLM_PYTHON"], str(program), name, str(model)]
    done = subprocess.run(
        [*command, *map(json.dumps, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, f"{name} ended:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def whole_blocks(passed: dict[str, Any]) -> bool:
    """Return whether of each prompt all but its last, partial block was cached."""
    return bool(passed["cached"] == [96, 384, 384, 800])


class Completion(msgspec.Struct, frozen=True):
    """An answer, and how much of its prompt came from the cache."""

    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int


class VllmEngine:
    """An OpenAI server that can be killed, and started again on the same ports.

    `int_hashes`: it sends 64 bits of its blocks' hashes, as it does by default, not all 32 bytes.
    `transfer`: its `--kv-transfer-config`. `has_events`: it publishes KV events. `options`: further
    ones of its own.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        directory: Path,
        name: str,
        *,
        int_hashes: bool = True,
        transfer: dict[str, Any] | None = None,
        has_events: bool = True,
        options: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{self.events_port}"
        self.replay = f"tcp://127.0.0.1:{self.replay_port}"
        self.log = directory / f"{name}.log"
        self._command = [python, *self._arguments(model), *options]
        if has_events:
            self._command.append(f"--kv-events-config={json.dumps(self._events_config())}")
        if transfer is not None:
            self._command.append(f"--kv-transfer-config={json.dumps(transfer)}")
        own = {
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(int_hashes)),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "PYTHONPATH": str(ROOT),  # of our connector
        }
        self._environment = os.environ | ENVIRONMENT | own
        self._process: subprocess.Popen[bytes] | None = None

    def _events_config(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": f"kv@{self.name}@{MODEL_NAME}",
        }

    def _arguments(self, model: Path) -> list[str]:
        return [
            "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={self.port}",
            f"--model={model}", f"--served-model-name={MODEL_NAME}", "--dtype=bfloat16",
            "--enforce-eager", "--max-model-len=2048", f"--block-size={BLOCK_SIZE}",
            f"--num-gpu-blocks-override={NUM_BLOCKS}", "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
        ]  # fmt: skip

    def start(self) -> None:
        """Begin to start; see `wait`."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the engine answers."""

        def is_up():
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} ended:\n{self.log_tail()}"
            return self._answers()

        try:
            until(is_up, START_S, poll_s=0.2)
        except TimeoutError:
            raise AssertionError(f"{self.name} is not up:\n{self.log_tail()}") from None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def pause(self) -> None:
        """Stop its processes: an idle one polls for seconds after a request."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Server and engine core at once, without a word."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def complete(
        self, token_ids, max_tokens, cache_salt=None, source=None, **extra
    ) -> Completion:
        """Decode greedily. `source`: of a decision. `extra`: as `kv_cache_report_mode`."""
        body = {
            "model": MODEL_NAME, "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "vllm_xargs": extra,
        }  # fmt: skip
        if source is not None:
            body["kv_transfer_params"] = {"source": source}
        return await self._ask("/v1/completions", body, cache_salt)

    async def chat(self, messages, max_tokens, cache_salt=None) -> Completion:
        body = {
            "model": MODEL_NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return await self._ask("/v1/chat/completions", body, cache_salt)

    async def tokenize(self, messages) -> list[int]:
        """The prompt that the chat template makes of these messages."""
        body = {"model": MODEL_NAME, "messages": messages}
        return (await self._post("/tokenize", body))["tokens"]

    async def metric(self, name: str, label: str = "") -> float:
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, verify=NO_TLS) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        values = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in values)

    async def _ask(self, path, body, cache_salt) -> Completion:
        answer = await self._post(path, body | ({"cache_salt": cache_salt} if cache_salt else {}))
        usage = answer["usage"]
        return Completion(
            answer["choices"][0]["token_ids"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )

    async def _post(self, path, body):
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, verify=NO_TLS) as client:
            answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def history(self) -> list[dict]:
        """Every event since the start, in order, as the replay socket returns them."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.replay)
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            events = []
            while True:
                assert socket.poll(10_000), f"{self.name} does not replay"
                payload = socket.recv_multipart()[-1]
                if not payload:
                    return events
                events += msgspec.msgpack.decode(payload)[1]

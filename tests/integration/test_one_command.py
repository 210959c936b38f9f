"""One command before running engines: attached by URL, and asked through the OpenAI endpoint."""

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress

import httpx

from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually, free_port

PROMPT = list(range(1, 42))

STATE_AS_OF_NOW = re.compile(
    r"exact \(0: 2 blocks\)|lagging \(0: 2 blocks\): last confirmed \d+\.\d s ago"
)
"""On a slow machine a second may pass between a confirmation and the line."""


async def test_repeated_completion_reaches_the_engine_that_holds_its_prefix():
    port = free_port()
    one, other = OpenAiEngine(), OpenAiEngine()
    fields = {"workers": f"{one.url},{other.url}", "openai_port": port}
    async with one.running(), other.running(), DirectRouter(**fields).running() as router:

        async def lifecycles():
            return [each["lifecycle"] for each in (await router.client.get("/workers")).json()]

        await eventually(lambda: equals(lifecycles(), ["schedulable"] * 2))
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            first = await client.post("/v1/completions", json=body)
            assert first.status_code == 200
            home = int(first.headers["x-worker-id"])

            async def is_indexed():
                overlaps = await router.overlaps(PROMPT, model_name="m")
                return overlaps.get((home, 0)) == 10 and await is_idle()

            async def is_idle():
                ranks = (await router.client.get(f"/workers/{home}")).json()["ranks"]
                return not any(rank["active_requests"] for rank in ranks)

            await eventually(is_indexed)
            for _ in range(5):
                await eventually(is_idle)
                again = await client.post("/v1/completions", json=body)
                assert int(again.headers["x-worker-id"]) == home
                cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == 40


def on_a_terminal(*arguments):
    """A router that writes to a terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "router", "serve", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    return process, ours


HEADS = ("http", "OpenAI", "see its", "try a")


async def test_terminal_shows_a_line_of_each_engine_and_the_addresses():
    http, openai = free_port(), free_port()
    engine, absent, shown = OpenAiEngine(), f"http://127.0.0.1:{free_port()}", bytearray()
    ports = ["--http-port", str(http), "--openai-port", str(openai), "--host", "127.0.0.1"]

    def has_all():
        with suppress(BlockingIOError):
            shown.extend(os.read(terminal, 65_536))
        return b"try a prompt" in shown

    async with engine.running():
        process, terminal = on_a_terminal("--workers", f"{engine.url},{absent}", *ports)
        try:
            await eventually(has_all, timeout_s=60)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            os.close(terminal)
    lines = [line for line in shown.decode().splitlines() if line.startswith(HEADS)]
    *engines, addresses, workers, prompt = lines
    present, away = sorted(engines, key=lambda line: line.startswith(absent))
    sentence = (
        f"{engine.url}  vLLM 0.32.0, m, 1 rank of 1000 blocks of 4 tokens; events with replay; "
        "proved by a request: "
    )
    assert present.startswith(sentence)
    assert STATE_AS_OF_NOW.fullmatch(present.removeprefix(sentence))
    assert away.startswith(f"{absent}  not up yet: nothing listens there; retrying each second")
    assert addresses == (
        f"OpenAI endpoint  http://127.0.0.1:{openai}/v1      dashboard  http://127.0.0.1:{http}/"
    )
    assert workers == f"see its workers   kv-router top --url http://127.0.0.1:{http}"
    assert prompt.startswith(f"try a prompt      curl -s http://127.0.0.1:{openai}/v1/completions ")

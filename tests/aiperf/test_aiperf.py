"""aiperf, unmodified, drives OpenAI's interface of `kv-router up`, with the fleet's own tokenizer.

Every request is answered in full, and none survives in the books of the router.
"""

import asyncio
import json
import os

import httpx
import pytest

from support.processes.servers import eventually
from support.processes.up_command import SMALL_MODEL, ups

pytestmark = [pytest.mark.aiperf, pytest.mark.timeout(1200)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RUN_S = 300
ISL, OSL = 300, 16
"""Tokens of a turn, which are bytes."""

SILENT = ("--ui=none", "--no-gpu-telemetry", "--no-server-metrics", "--use-server-token-count")


class Driven:
    """A fleet, and aiperf before it."""

    def __init__(self, fleet, directory, report):
        self._fleet = fleet
        self._directory = directory
        self._report = report
        self._runs = 0

    async def drive(self, kind, *options, isl=ISL, osl=OSL, concurrency=4):
        """What aiperf says of a run: its JSON export."""
        self._runs += 1
        artefacts = self._directory / f"aiperf-{self._runs}"
        command = [
            os.environ["AIPERF"], "profile", "--model=default", f"--url={self._openai_url}",
            f"--endpoint-type={kind}", f"--tokenizer={self._directory / 'tokenizer'}",
            f"--isl={isl}", f"--osl={osl}", f"--concurrency={concurrency}", "--random-seed=1",
            f"--artifact-dir={artefacts}", *SILENT, *options,
        ]  # fmt: skip
        aiperf = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(RUN_S):
                output, _ = await aiperf.communicate()
        finally:
            if aiperf.returncode is None:
                aiperf.kill()
                await aiperf.wait()
        export = artefacts / "profile_export_aiperf.json"
        assert export.exists(), output.decode()[-4000:]
        found = json.loads(export.read_text())
        self._report(kind, options, found)
        return found

    async def ended(self, path):
        """{how: how many requests}."""
        name = f'route="POST {path}"'
        lines = [line for line in await self._metrics("requests_total") if name in line]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    async def handed_over(self):
        lines = await self._metrics('prefills_total{outcome="handed_over"}')
        return sum(float(line.split()[-1]) for line in lines)

    async def until_free(self):
        """No reservation is left."""
        await eventually(self._is_free)

    async def _is_free(self):
        async with httpx.AsyncClient() as client:
            loads = (await client.get(f"http://127.0.0.1:{self._fleet.port}/loads")).json()
        return not any(rank["active_requests"] for scope in loads for rank in scope["loads"])

    async def _metrics(self, name):
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self._openai_url}/metrics")).text
        return [each for each in text.splitlines() if each.startswith(f"kv_router_forward_{name}")]

    @property
    def _openai_url(self):
        return f"http://127.0.0.1:{self._fleet.openai_port}"


@pytest.fixture
async def driven(tmp_path, monkeypatch, record_property):
    """Starts a fleet with these options."""
    if "AIPERF" not in os.environ:
        pytest.fail("AIPERF names no aiperf; `make test-aiperf` does")
    for setting, value in SMALL_MODEL.items():
        monkeypatch.setenv(setting, value)

    def report(kind, options, found):
        record_property("measured", summary(kind, options, found))

    async with ups() as start:

        async def driven(*options):
            fleet = await start("--no-demo", "--data-dir", str(tmp_path), *options)
            await fleet.until("Ctrl-C stops everything")
            return Driven(fleet, tmp_path, report)

        yield driven


def summary(kind, options, found):
    """One line of what aiperf measured."""
    first = found.get("time_to_first_token", {})
    said = [f"{kind} {' '.join(options)}:", f"{succeeded(found):.0f} requests,"]
    said.append(f"{found['request_throughput']['avg']:.1f} per s,")
    if first:
        between = found["inter_token_latency"]["p50"]
        said.append(f"first token p50 {first['p50']:.0f} ms, between tokens {between:.1f} ms,")
    return " ".join([*said, f"{cached(found):.0f} tokens cached of {prompts(found):.0f}"])


def succeeded(found):
    return found["request_count"]["avg"]


def cached(found):
    return found["total_usage_prompt_cache_read_tokens"]["avg"]


def prompts(found):
    return found["total_usage_prompt_tokens"]["avg"]


def is_whole(found, requests):
    """Every request was answered, with all the tokens that it asked for."""
    asked = found["total_usage_completion_tokens"]["avg"]
    return (found["error_summary"], succeeded(found), asked) == ([], requests, requests * OSL)


async def test_chats_and_texts_streamed_and_not(driven):
    up = await driven("--workers=2")
    talks = "--num-conversations=8", "--conversation-turn-mean=3", "--session-header=x-session-id"
    prefixes = "--prefix-prompt-length=200", "--num-prefix-prompts=2", "--request-count=16"
    chats = await up.drive("chat", "--streaming", *talks)
    assert is_whole(chats, 24)
    assert cached(chats) > 8 * ISL, "the second turn of a talk, and the third, begin as the last"
    texts = await up.drive("completions", "--streaming", *prefixes)
    assert is_whole(texts, 16)
    assert cached(texts) > 0
    for found in (chats, texts):
        assert found["http_req_chunks_received"]["min"] > 1
    assert is_whole(await up.drive("chat", "--request-count=8"), 8)
    assert is_whole(await up.drive("completions", "--request-count=8"), 8)
    assert await up.ended(CHAT) == {"answered": 32}
    assert await up.ended(TEXT) == {"answered": 24}
    await up.until_free()


async def test_clients_that_hang_up_leave_nothing_behind(driven):
    """After a fifth of a second, in which 1,000 tokens cannot be had."""
    up = await driven("--workers=2")
    hang_up = "--request-cancellation-rate=50", "--request-cancellation-delay=0.2"
    found = await up.drive("chat", "--streaming", "--request-count=16", *hang_up, osl=1000)
    gone = sum(each["count"] for each in found["error_summary"])
    assert {each["error_details"]["code"] for each in found["error_summary"]} == {499}
    assert 0 < gone < 16
    assert succeeded(found) == 16 - gone
    await up.until_free()
    assert await up.ended(CHAT) == {"answered": 16 - gone, "client_gone": gone}


async def test_prompts_that_are_handed_over(driven):
    up = await driven("--disaggregated=1:1")
    found = await up.drive("chat", "--streaming", "--request-count=16")
    assert is_whole(found, 16)
    assert await up.handed_over() == 16
    assert cached(found) > 0.9 * prompts(found)
    await up.until_free()

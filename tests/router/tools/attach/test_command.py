"""`kv-router attach`, before a real router and engine."""

import asyncio

import pytest

from router.tools.attach.command import attach
from support.engines.openai_engine import OpenAiEngine
from support.fleets.direct import DirectRouter
from support.processes.servers import free_port


async def status_of(router, *arguments):
    url = str(router.client.base_url)
    return await asyncio.to_thread(attach, [*arguments, "--router-url", url])


async def test_attached_engine_is_described(capsys):
    async with OpenAiEngine().running() as engine, DirectRouter().running() as router:
        await status_of(router, engine.url)
        described, lifecycle = capsys.readouterr().out.splitlines()
        assert described.startswith(f"{engine.url}  vLLM 0.32.0, m, 1 rank of 1000 blocks")
        assert lifecycle.startswith("worker ")


async def test_engine_that_is_not_up_is_status_1(capsys):
    async with DirectRouter().running() as router:
        assert await status_of(router, f"http://127.0.0.1:{free_port()}") == 1
        assert "not up yet" in capsys.readouterr().out


async def test_invalid_engine_is_refused_with_the_reason(capsys):
    async with DirectRouter().running() as router:
        assert await status_of(router, "nonsense") == 1
        assert "endpoint" in capsys.readouterr().err


def test_missing_engine_is_a_wrong_command_line():
    with pytest.raises(SystemExit) as caught:
        attach([])
    assert caught.value.code == 2

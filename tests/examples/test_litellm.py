"""The example for LiteLLM, in an environment that has it, before real engines."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from support.fleets.systems import TEXTS
from support.processes.servers import eventually

pytestmark = pytest.mark.systems

EXAMPLE = Path(__file__).parents[2] / "examples/litellm_strategy.py"


async def chat(fleet, text, max_tokens=4):
    python = os.environ.get("LITELLM_PYTHON")
    if python is None:
        pytest.fail("LITELLM_PYTHON names no Python with LiteLLM; `make test-integrations` does")
    return await asyncio.create_subprocess_exec(
        python, EXAMPLE, "--router", fleet.url, "--max-tokens", str(max_tokens), text,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip


async def test_chat_reaches_the_worker_that_holds_its_prompt(fleet):
    for worker_id, text in TEXTS.items():
        prompt = list(f"<user>{text}\n".encode())
        await fleet.complete(worker_id, 0, prompt, 1)
        await fleet.until_drained()
        process = await chat(fleet, text)
        said = (await process.communicate())[0].decode(errors="replace")
        assert process.returncode == 0, said
        cached, length = re.search(r"(\d+) of (\d+) tokens cached", said).groups()
        assert int(cached) >= len(prompt) - 16, said
        assert int(length) >= len(prompt)
        await fleet.until_load(0, 0)


async def test_booking_lasts_until_the_end_of_the_stream(fleet):
    process = await chat(fleet, "Once upon a time. " * 4, 1024)
    await eventually(lambda: is_active(fleet))
    said = (await process.communicate())[0].decode(errors="replace")
    assert process.returncode == 0, said
    assert await fleet.load() == (0, 0)


async def is_active(fleet):
    return (await fleet.load())[0] == 1

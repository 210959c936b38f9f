"""`kv-router up --vllm`: two real engines, attached by URL, and conversations through them."""

import os
import re

import pytest

from support.engines.tiny_llama import write_tiny_llama
from support.processes.up_command import ups
from support.vllm.vllm_engines import ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ARGUMENTS = (
    "--dtype=bfloat16 --enforce-eager --max-model-len=2048 --block-size=32 "
    "--num-gpu-blocks-override=200"
)
COMMAND = """#!/bin/sh
# The command of vLLM's build for the CPU does not start: it looks for a package named vllm.
shift; model=$1; shift
exec {python} -m vllm.entrypoints.openai.api_server --model "$model" "$@"
"""


async def test_conversations_are_predicted_and_reused(tmp_path, vllm_python, monkeypatch):
    write_tiny_llama(tmp_path / "tiny")
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=vllm_python))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    options = "--vllm", str(tmp_path / "tiny"), "--vllm-args", ARGUMENTS, "--no-stay"
    async with ups() as start:
        fleet = await start(*options, "--data-dir", str(tmp_path / "fleet"))
        assert await fleet.wait() == 0, fleet.output
    assert len(re.findall(r"vLLM \S+, tiny, .* events with replay", fleet.output)) == 2
    right, requests = re.search(r"^(\d+) of (\d+) predictions", fleet.output, re.M).groups()
    assert int(requests) == 54
    assert int(right) > 40  # requests that arrive together are placed before their blocks are known
    cached = re.search(r"^Of (\d+) tokens of 54 prompts (\d+) were cached", fleet.output, re.M)
    assert int(cached[2]) > int(cached[1]) / 2

"""The source that the forwarder names, before vLLM's own P2P tier: real tiers in two processes,
whose blocks go through NIXL. The engines are scripted: on the CPU vLLM 0.32 has no copy between an
engine's memory and its tiers.
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.engines.upstreams import hangs_up, response, says
from support.fleets.forwarding import COMPLETION, Scene
from support.processes.servers import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[1] / "support/vllm/vllm_p2p.py"
START_S = 240
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
ANSWERS = says(response(b"{}", "200 OK", "content-type: application/json"))
HELD, ALL = [*range(6)], 8


def started(vllm_python, *arguments, log):
    program = asyncio.create_subprocess_exec
    environment = os.environ | ENVIRONMENT
    return program(
        vllm_python, PROGRAM, *arguments, stdin=PIPE, stdout=PIPE, stderr=log, env=environment
    )


@asynccontextmanager
async def tiers_with_blocks(vllm_python, port, log):
    """Tiers of a vLLM that hold blocks."""
    process = await started(vllm_python, "hold", str(port), log=log)
    try:
        async with asyncio.timeout(START_S):
            while (line := await process.stdout.readline()) != b"holds\n":
                assert line, "it has ended"
        yield process
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


async def hint_of_the_forwarder(nats_url, shared):
    """What the engine of worker 1 is told, where worker 2 holds the prompt."""
    async with Scene.of(nats_url, {1: ANSWERS, 2: hangs_up}, shared=shared) as its:
        await its.holds(2, COMPLETION["prompt"])
        await its.forward.complete()
        [body] = its.asked(1)
        return body["kv_transfer_params"]


async def test_stock_tiers_load_the_blocks_of_the_source_that_the_forwarder_names(
    nats_server, tmp_path, vllm_python
):
    reads_at, holds_at = free_port(), free_port()
    of = {1: [f"vllm-p2p://127.0.0.1:{reads_at}"], 2: [f"vllm-p2p://127.0.0.1:{holds_at}"]}
    hint = await hint_of_the_forwarder(nats_server.url, of)
    with (tmp_path / "vllm.log").open("wb") as log:
        async with tiers_with_blocks(vllm_python, holds_at, log):
            reader = await started(vllm_python, "read", str(reads_at), json.dumps(hint), log=log)
            said, _ = await asyncio.wait_for(reader.communicate(), START_S)
    loaded = json.loads(said.splitlines()[-1])
    assert hint.keys() == {"remote_kv_source"}
    assert loaded == {
        "peer": f"127.0.0.1:{holds_at}",
        "id": hint["remote_kv_source"]["kv_request_id"],
        "probes": True,
        "results": ALL,
        "hits": HELD,
        "same": [True] * len(HELD),
    }

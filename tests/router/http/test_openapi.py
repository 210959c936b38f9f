"""What `/docs` says is true: schemathesis asks what it allows, and what it does not."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from direct import DirectRouter

EXAMPLES = int(os.environ.get("KV_FUZZ_EXAMPLES", 3))
COMMAND = (
    "run",
    f"--max-examples={EXAMPLES}",
    "--seed=1",
    "--phases=examples,fuzzing",
    "--checks=all",
    # A schema takes 1.0 for an integer, and does not say that hashes must fit a length.
    "--exclude-checks=positive_data_acceptance",
    "--generation-database=none",
    "--no-color",
)


@pytest.mark.timeout(3600 if EXAMPLES > 100 else 300)
async def test_schemathesis_finds_nothing(tmp_path):
    async with DirectRouter(use_kv_events=False).running() as router:
        worker = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}
        assert (await router.post("/workers", worker)).status_code == 201
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "schemathesis"),
            *COMMAND,
            f"{router.client.base_url}/openapi.json",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        report, _ = await process.communicate()
        assert process.returncode == 0, report.decode()
        assert "passed" in report.decode()
        assert (await router.post("/select", {"token_ids": [1]})).status_code in (200, 503)

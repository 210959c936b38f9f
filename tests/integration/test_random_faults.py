"""Random faults by seed, with real servers; one here, more with `make fuzz`."""

import asyncio
import os
import sys

import pytest

from support.fleets.scenarios import Scenario

FIRST_SEED = int(os.environ.get("FUZZ_SERVER_FIRST", "1"))
RUNS = int(os.environ.get("FUZZ_SERVER_RUNS", "1"))


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
async def test_random_faults_leave_the_index_right(plane, seed):
    scenario = Scenario(plane, seed)
    try:
        async with asyncio.timeout(300):
            await scenario.run()
            await plane.until_right()
    except Exception:
        sys.stderr.write(f"seed {seed}: {scenario.faults}\n")
        raise

from pathlib import Path

import pytest

from router.tools.up.fleet import FleetNotReadyError, FleetPlan, reference_fleet


async def test_a_fleet_that_does_not_get_ready_says_what_each_process_said_last(tmp_path: Path):
    plan = FleetPlan(directory=tmp_path, workers=2, dp_size=1, num_blocks=64, router_port=0)
    fleet = reference_fleet(plan)
    (tmp_path / "router.log").write_text("compiling its kernels\n\n")
    with pytest.raises(FleetNotReadyError, match="router: compiling its kernels") as caught:
        await fleet.until_ready(patience_s=0.2)
    assert caught.value.last_lines == {
        "nats": "",
        "router": "compiling its kernels",
        "worker-1": "",
        "worker-2": "",
    }

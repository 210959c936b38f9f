"""The whole corpus, played over sockets to a router process in direct mode."""

import pytest
from conformance.corpus import SCENARIOS
from conformance.player import Patience, play
from conformance.systems.ours import KvRouter
from conformance.table import mark

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

UNKNOWABLE = {
    "stored batch lost, no replay",
    "removal lost, no replay",
    "replay socket gone, then a stored batch lost",
    "engine: 20, restart, 40 of which 20 before we reconnect, no replay",
    "router: kill −9, engine idle, no replay",
}


async def test_every_count_is_right_or_said_to_be_uncertain(tmp_path):
    patience = Patience(settle_s=1.0, limit_s=20.0)
    rows, unavailable = await play(SCENARIOS, {"ours": KvRouter}, tmp_path, patience)
    assert not unavailable
    scored = {
        scenario.name: row["ours"]
        for scenario, row in zip(SCENARIOS, rows, strict=True)
        if not scenario.convention
    }
    wrong = {name: cell for name, cell in scored.items() if not cell.is_right}
    assert set(wrong) <= UNKNOWABLE
    assert {mark(cell) for cell in wrong.values()} <= {"◐"}
    assert not any(cell.ghosts for cell in wrong.values())

"""The command, and a third of the corpus, played over sockets to a router process in direct mode.

`kv-router conformance` plays all of it.
"""

import json

import pytest

from router.cli import main
from router.errors import ConfigError
from router.tools.conformance.command import conformance
from router.tools.conformance.corpus import SCENARIOS
from router.tools.conformance.player import Patience, play
from router.tools.conformance.score import Mark
from router.tools.conformance.systems.kv_router import KvRouter

NAIVE = "conformance_adapter:NaiveRouter"
"""The example of docs/conformance.md."""


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_every_count_is_right_or_said_to_be_uncertain(tmp_path):
    patience = Patience(settle_s=1.0, limit_s=20.0)
    scenarios = SCENARIOS[::6]
    rows, unavailable = await play(scenarios, {"ours": KvRouter}, tmp_path, patience)
    assert not unavailable
    cells = [
        (scenario, row["ours"])
        for scenario, row in zip(scenarios, rows, strict=True)
        if not scenario.convention
    ]
    wrong = {scenario.name: cell for scenario, cell in cells if cell.mark is not Mark.RIGHT}
    unknowable = {scenario.name for scenario, _ in cells if scenario.unknowable}
    assert set(wrong) <= unknowable
    assert {cell.mark for cell in wrong.values()} <= {Mark.SAID}
    assert not any(cell.ghosts for cell in wrong.values())


def test_adapter_of_another_router_is_scored(tmp_path, capsys):
    found, shown = tmp_path / "found.json", tmp_path / "badge.svg"
    files = [f"--json={found}", f"--badge={shown}"]
    assert conformance([f"--adapter={NAIVE}", "--only=without rank", "--quick", *files]) == 0
    assert "| **right** | **1 of 1** |" in capsys.readouterr().out
    assert json.loads(found.read_text())["totals"]["system"]["right"] == 1
    assert "1 of 1, 0 silently wrong" in shown.read_text()


def test_silently_wrong_router_has_exit_status_1(capsys):
    assert (
        main(["conformance", f"--adapter={NAIVE}", "--only=stored twice, removed once", "--quick"])
        == 1
    )
    assert "✗ 10 missing" in capsys.readouterr().out


def test_unknown_adapter_and_scenario_are_refused(capsys):
    with pytest.raises(ConfigError, match="no_such_module"):
        conformance(["--adapter=no_such_module:Router"])
    with pytest.raises(SystemExit) as ended:
        conformance(["--only=no such words"])
    assert ended.value.code == 2
    assert "no such words" in capsys.readouterr().err

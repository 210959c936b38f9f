"""Scenarios played over sockets to routers whose faults are known."""

import pytest
from conformance.corpus import SCENARIOS
from conformance.events import prompt, publish, stored, text
from conformance.player import Patience, play
from conformance.stage import CorpusError
from conformance.steps import Ask, Scenario
from conformance.table import Table, mark

from benchmarks.naive_router import BestOnlyRouter, DoubtingRouter, NaiveRouter

PATIENCE = Patience(settle_s=0.2, limit_s=0.2)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


async def played(kind, tmp_path, *names):
    rows, unavailable = await play(
        [BY_NAME[name] for name in names], {"it": kind}, tmp_path, PATIENCE
    )
    assert not unavailable
    return [row["it"] for row in rows]


async def test_simple_scenarios_are_right(tmp_path):
    cells = await played(
        NaiveRouter, tmp_path, "stored, evicted from the tail, stored again",
        "300 blocks, one a batch", "vllm 0.33: 32-byte hashes",
    )  # fmt: skip
    assert [mark(cell) for cell in cells] == ["✓"] * 3
    assert len(cells[0].questions) == 2


async def test_faults_are_found_and_counted(tmp_path):
    twice, salted, idle, killed = await played(
        NaiveRouter, tmp_path, "stored twice, removed once", "salt A, asked without",
        "engine: 20, restart, idle", "router: kill −9, engine idle, replay",
    )  # fmt: skip
    assert (twice.ghosts, twice.missing) == (0, 10)
    assert (salted.ghosts, salted.missing) == (10, 0)
    assert (idle.ghosts, idle.missing) == (20, 0)
    assert (killed.ghosts, killed.missing) == (0, 20)
    assert {mark(cell) for cell in (twice, salted, idle, killed)} == {"✗"}


async def test_lost_batches_are_lost_and_what_follows_is_not(tmp_path):
    (lost,) = await played(NaiveRouter, tmp_path, "stored batch lost, no replay")
    assert (lost.ghosts, lost.missing) == (0, 8)


async def test_doubt_is_distinguished_from_silence(tmp_path):
    right, wrong = await played(
        DoubtingRouter, tmp_path, "map, an unknown field", "salt A, asked without"
    )
    assert (mark(right), mark(wrong), wrong.said) == ("✓", "◐", "unsure")


async def test_router_without_scores_is_compared_by_its_choice(tmp_path):
    (cell,) = await played(BestOnlyRouter, tmp_path, "4 and 2 blocks; the first evicts its second")
    assert mark(cell) == "✓"
    assert cell.questions[-1].compared.counts == (None, 2)


async def test_a_system_that_does_not_start_is_named(tmp_path):
    class Absent(NaiveRouter):
        async def start(self, seats):
            raise RuntimeError("not for this processor")

    scenarios = [BY_NAME["map, an unknown field"]]
    rows, unavailable = await play(
        scenarios, {"it": NaiveRouter, "absent": Absent}, tmp_path, PATIENCE
    )
    assert unavailable == {"absent": "not for this processor"}
    assert list(rows[0]) == ["it"]


async def test_failed_answer_counts_as_none(tmp_path):
    class Failing(NaiveRouter):
        async def ask(self, seats, prompt):
            raise ValueError("overlaps? none of your business")

    (cell,) = await played(Failing, tmp_path, "map, an unknown field")
    assert (mark(cell), cell.missing) == ("✗", 4)
    assert "none of your business" in cell.problem


async def test_a_scenario_cannot_state_another_truth(tmp_path):
    text_a = text("a", 2)
    lie = Scenario("a lie", "lies", (publish(stored(text_a)), Ask(prompt(text_a), (1,))))
    with pytest.raises(CorpusError, match="a lie"):
        await play([lie], {"it": NaiveRouter}, tmp_path, PATIENCE)


async def test_table_counts_differences_without_conventions(tmp_path):
    names = ["map, an unknown field", "salt A, asked without", "a medium nobody knows (CXL)"]
    cells = await played(NaiveRouter, tmp_path, *names)
    scenarios = tuple(BY_NAME[name] for name in names)
    table = Table(scenarios, {"it": "naive"}, tuple({"it": cell} for cell in cells))
    score = table.scored("it")
    assert (score.right, score.said, score.wrong, score.ghosts) == (1, 0, 1, 10)
    lines = table.markdown().splitlines()
    assert "| salt A, asked without | ✗ 10 ghosts |" in lines
    assert "| a medium nobody knows (CXL) | (4) |" in lines
    assert "| identity, of 1 | 0 |" in table.summary().splitlines()
    assert "| **right, of 2** | **1** |" in table.summary().splitlines()

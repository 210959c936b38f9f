"""Scenarios played over sockets to routers whose faults are known."""

import pytest
from conformance_adapter import NaiveRouter

from router.tools.conformance.corpus import SCENARIOS
from router.tools.conformance.events import prompt, publish, stored, text
from router.tools.conformance.player import Patience, play
from router.tools.conformance.score import Mark
from router.tools.conformance.stage import CorpusError
from router.tools.conformance.steps import Ask, Scenario
from router.tools.conformance.table import Table, badge
from support.processes.naive_router import (
    BestOnlyRouter,
    DoubtingRouter,
    MarkedRouter,
    WarningRouter,
)

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
        "300 blocks, one a batch", "map, 32-byte hashes, one removed",
    )  # fmt: skip
    assert [cell.mark for cell in cells] == [Mark.RIGHT] * 3
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
    assert {cell.mark for cell in (twice, salted, idle, killed)} == {Mark.WRONG}


async def test_lost_batches_are_lost_and_what_follows_is_not(tmp_path):
    (lost,) = await played(NaiveRouter, tmp_path, "stored batch lost, no replay")
    assert (lost.ghosts, lost.missing) == (0, 8)


async def test_doubt_is_distinguished_from_silence(tmp_path):
    right, wrong = await played(
        DoubtingRouter, tmp_path, "map, an unknown field", "salt A, asked without"
    )
    assert (right.mark, wrong.mark, wrong.said) == (Mark.RIGHT, Mark.SAID, "unsure")
    assert (right.is_false_alarm, wrong.is_false_alarm) == (True, False)


async def test_router_without_scores_is_compared_by_its_choice(tmp_path):
    (cell,) = await played(BestOnlyRouter, tmp_path, "4 and 2 blocks; the first evicts its second")
    assert cell.mark is Mark.RIGHT
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
    assert (cell.mark, cell.missing) == (Mark.WRONG, 4)
    assert "none of your business" in cell.problem


async def test_a_scenario_cannot_state_another_truth(tmp_path):
    text_a = text("a", 2)
    lie = Scenario("a lie", "lies", (publish(stored(text_a)), Ask(prompt(text_a), (1,))))
    with pytest.raises(CorpusError, match="a lie"):
        await play([lie], {"it": NaiveRouter}, tmp_path, PATIENCE)


async def test_table_counts_differences_without_conventions(tmp_path):
    names = ["map, an unknown field", "salt A, asked without", "salt A, asked with salt B"]
    names += ["an unknown medium (CXL)", "stored batch lost, no replay"]
    cells = await played(NaiveRouter, tmp_path, *names)
    scenarios = tuple(BY_NAME[name] for name in names)
    table = Table(scenarios, {"it": "naive"}, tuple({"it": cell} for cell in cells))
    score, rows = table.by_cause("it"), table.by_row("it")
    assert (score.right, score.said, score.wrong, score.with_ghosts) == (1, 0, 1, 1)
    assert (rows.right, rows.wrong, table.unknowable("it").wrong) == (1, 2, 1)
    lines = table.row_lines().splitlines()
    assert "| salt A, asked without | ✗ 10 ghosts |" in lines
    assert "| an unknown medium (CXL) | (4) |" in lines
    assert "| stored batch lost, no replay | (✗ 8 missing) |" in lines
    assert "| vLLM's salt, in extra_keys (2) | ✗ 2 of 2 |" in table.cause_lines().splitlines()
    assert "| **right** | **1 of 2** |" in table.totals().splitlines()
    assert "1 of 2, 1 silently wrong" in badge(score)


async def test_warnings_of_the_log_count_for_the_scenario_that_acted(tmp_path):
    wrong, right, silent = await played(
        WarningRouter, tmp_path, "stored twice, removed once",
        "stored, evicted from the tail, stored again", "salt A, asked without",
    )  # fmt: skip
    assert (wrong.mark, wrong.said) == (Mark.SAID, "in its log")
    assert right.is_false_warning
    assert (silent.mark, silent.remarks) == (Mark.WRONG, ())


async def test_each_system_reads_salts_in_the_form_of_its_own_front_end(tmp_path):
    kinds = {"plain": NaiveRouter, "marked": MarkedRouter}
    rows, _ = await play([BY_NAME["salt A, asked without"]], kinds, tmp_path, PATIENCE)
    assert {name: cell.mark for name, cell in rows[0].items()} == {
        "plain": Mark.WRONG,
        "marked": Mark.RIGHT,
    }


async def test_a_cause_that_a_design_rules_out_is_not_scored(tmp_path):
    class Skipping(NaiveRouter):
        skips = frozenset({"vLLM's salt, in extra_keys"})

    names = ["map, batch without rank", "salt A, asked without"]
    scenarios = tuple(BY_NAME[name] for name in names)
    rows, _ = await play(scenarios, {"it": Skipping}, tmp_path, PATIENCE)
    table = Table(scenarios, {"it": "skipping"}, tuple(rows))
    assert table.by_cause("it").count == 1
    assert "| salt A, asked without | – |" in table.row_lines().splitlines()

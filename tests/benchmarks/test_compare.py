"""The report of `make compare`."""

import json
import re
import sys

import compare_page
import compare_parts
import compare_plots
from compare_parts import PARTS, Outcome, Part, run
from compare_plots import Bar

ROW = {"name": "a <row>", "ours": 2.0, "peer": 4.0, "unit": "ms", "goal": 1.0, "holds": True}
ROW |= {"bounded": False}


def test_better_is_better_whichever_way_a_ratio_is_counted():
    times = compare_page.times_better
    assert times(ROW | {"ratio": 0.5, "lower": True}) == 2
    assert times(ROW | {"ratio": 2.0, "lower": False}) == 2


def scripted(tmp_path, monkeypatch, text):
    monkeypatch.setattr(compare_parts, "HERE", tmp_path)
    (tmp_path / "script.py").write_text(text)
    part = Part("A part", "a peer", "rows", ["script.py"])
    return run(part, ["script.py"], quick=True)


def test_a_part_that_fails_is_shown_with_its_last_words(tmp_path, monkeypatch):
    outcome = scripted(tmp_path, monkeypatch, "raise SystemExit('no <such> package')")
    shown = compare_page.page({"machine": "this"}, [outcome])
    assert outcome.failure.startswith("no <such> package")
    assert "no &lt;such&gt; package" in shown
    assert sys.executable not in shown


def test_rows_are_shown_even_if_goals_are_missed(tmp_path, monkeypatch):
    rows = [ROW | {"ratio": 0.5, "lower": True, "holds": False}]
    text = f"import json\nprint(json.dumps({rows!r}))\nraise SystemExit(1)"
    outcome = scripted(tmp_path, monkeypatch, text)
    assert outcome.found == rows
    shown = compare_page.page({}, [outcome])
    assert "a &lt;row&gt;" in shown
    assert "2 ×" in shown
    assert '<td class="no">NO</td>' in shown
    assert "Goals that were missed" in shown


def test_parts_of_a_trace_need_one():
    def commands(trace):
        return list(compare_parts.commands_of(PARTS["policies"], quick=True, trace=trace))

    assert commands("") == []
    started = ["scheduling.py", "a.jsonl", "--json", "--quick", "--only"]
    assert commands("a.jsonl") == [[*started, "table"], [*started, "policies"]]


def test_tables_that_no_command_makes_are_named_with_the_command_that_would():
    part = PARTS["policies"]
    missing = list(compare_parts.not_run("policies", part, trace=""))
    assert [each.table for each in missing[:1]] == [part.title]
    with_trace = list(compare_parts.not_run("policies", part, trace="a.jsonl"))
    assert with_trace == missing[1:]
    shown = compare_page.page({}, [], missing)
    assert "Tables that were not made" in shown
    assert "make compare TRACE=FILE" in shown
    assert "scheduling.py TRACE --only physics" in shown


def test_part_without_its_program_is_a_table_that_was_not_made(monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", "/nowhere/python")
    outcome = run(PARTS["connectors"], ["engine_cache.py"], quick=True)
    shown = compare_page.page({}, [outcome])
    assert outcome.failure == "VLLM_PYTHON=/nowhere/python: no such file"
    assert "make .vllm-venv/.installed" in shown
    assert "Tables that were not made" in shown


def test_part_finds_its_program_in_its_environment(tmp_path, monkeypatch):
    program = tmp_path / "envoy"
    program.touch()
    monkeypatch.setenv("ENVOY", str(program))
    monkeypatch.setattr(compare_parts, "HERE", tmp_path)
    (tmp_path / "script.py").write_text("import json, os\nprint(json.dumps([os.environ['ENVOY']]))")
    part = Part("A part", "a peer", "rows", ["script.py"], needs=compare_parts.ENVOY)
    assert run(part, ["script.py"], quick=True).found == [str(program)]


def test_targets_that_install_programs_are_in_the_makefile():
    makefile = (compare_parts.ROOT / "Makefile").read_text()
    assert "VLLM_STAMP := $(VLLM_VENV)/.installed" in makefile
    assert "VLLM_VENV := .vllm-venv" in makefile
    assert f"\n{compare_parts.ENVOY.target}:" in makefile


def test_with_write_each_benchmark_keeps_its_rows_and_a_full_run_has_the_long_sections():
    def commands(*, quick):
        return list(compare_parts.commands_of(PARTS["service"], quick=quick, trace="", write=True))

    assert all("--write" in command for command in commands(quick=True))
    assert len(commands(quick=False)) > len(commands(quick=True))


def test_goals_are_labelled_as_in_the_plot():
    def goal(**fields):
        row = ROW | {"ratio": 0.5} | fields
        outcome = Outcome(PARTS["index"], "index.py", 1.0, [row])
        return re.findall("[≥≤] [^<]*", compare_page.page({}, [outcome]))

    assert "≥ 2 ×" in goal(goal=0.5, lower=True)
    assert "≥ 4 ×" in goal(goal=4.0, lower=False)
    assert "≤ 4 ms" in goal(goal=4.0, lower=True, bounded=True)
    assert goal(goal=0, lower=False) == []


def test_a_figure_without_a_peer_is_not_drawn_beside_one():
    alone = ROW | {"goal": 4.0, "peer": 4.0, "ratio": 0.5, "lower": True, "bounded": True}
    shown = compare_page.page({}, [Outcome(PARTS["index"], "index.py", 1.0, [alone])])
    assert "<svg" not in shown
    assert "≤ 4 ms" in shown


def test_long_bars_are_cut_at_the_plot_edge_and_labelled_with_the_full_value():
    shown = compare_plots.bars([Bar("a", 1e-9), Bar("b", 123456.0), Bar("c", 1.0)])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', shown)]
    assert sum(widths) == compare_plots.PLOT_PX
    assert "123,456 ×" in shown


def test_peers_are_named_with_the_versions_that_are_installed():
    installed = "".join(
        (compare_parts.HERE / f"{name}requirements.txt").read_text()
        for name in ("peer-", "vllm-router-", "smg-")
    )
    named = {v for part in PARTS.values() for v in re.findall(r"\d+\.\d+\.\d+", part.peer)}
    assert named
    assert all(f"=={version}" in installed for version in named)


def test_faults_and_replays_are_shown_too():
    faults = json.loads((compare_parts.HERE / "results/conformance.json").read_text())
    faults["unavailable"] = {"other": "not on PyPI"}
    false_alarms = faults["totals"]["ours"]["doubted"]
    fields = dict.fromkeys(compare_page.REPLAYED.values(), 0.5)
    replays = [{"policy": "predictive", **fields}, {"policy": "random", **fields}]
    found = {"faults": faults, "trace": replays}
    shown = compare_page.page(
        {}, [Outcome(PARTS[name], name, 1.0, each) for name, each in found.items()]
    )
    assert "not on PyPI" in shown
    assert f"<td>{false_alarms}</td>" in shown
    assert "<td>random</td>" in shown

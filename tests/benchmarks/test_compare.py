"""The report of `make compare`."""

import sys

import compare_page
import compare_parts
from compare_parts import PARTS, Outcome, Part, run

ROW = {"name": "a <row>", "ours": 2.0, "peer": 4.0, "unit": "ms", "goal": 1.0, "holds": True}


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


def test_faults_and_replays_are_shown_too():
    counts = {"right": 3, "said": 1, "wrong": 0, "ghosts": 0, "missing": 7}
    faults = {"unavailable": {"other": "not on PyPI"}, "totals": {"ours": counts}}
    fields = dict.fromkeys(compare_page.REPLAYED.values(), 0.5)
    replays = [{"policy": "predictive", **fields}, {"policy": "random", **fields}]
    found = {"faults": faults, "trace": replays}
    shown = compare_page.page(
        {}, [Outcome(PARTS[name], name, 1.0, each) for name, each in found.items()]
    )
    assert "not on PyPI" in shown
    assert "<td>7</td>" in shown
    assert "<td>random</td>" in shown

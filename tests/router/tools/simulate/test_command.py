"""`kv-router simulate`, as it is called."""

import json
import re
from html.parser import HTMLParser

import pytest

from router.cli import main
from support.fleets.recordings import small

SMALL = ("--workers", "2", "--models", "8b", "--policies", "dynamo-1.0")


def mooncake(path, requests=40):
    lines = (
        {
            "timestamp": 40 * i,
            "input_length": 700 + 10 * i,
            "output_length": 1 + i % 7,
            "hash_ids": [i % 3, 100 + i] if 700 + 10 * i <= 1024 else [i % 3, 100 + i, 200 + i],
        }
        for i in range(requests)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path):
    return mooncake(tmp_path / "trace.jsonl")


def simulated(capsys, *arguments):
    """Exit status, what was printed, and what was complained about."""
    status = main(["simulate", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_table_has_a_heading(capsys, trace):
    status, out, _ = simulated(capsys, trace, *SMALL, "--seeds", "3 4", "--speeds", "1 2")
    assert status == 0
    assert "40 requests" in out
    assert "seeds: 3 4" in out
    assert "workers: 2 of 8b, blocks of 512 tokens" in out
    assert len(re.findall("^dynamo-1.0  ", out, re.MULTILINE)) == 2
    assert "arrival speed 2\n" in out
    assert "±" in out


def test_repeats_are_equal_to_the_last_character(capsys, trace):
    first = simulated(capsys, trace, *SMALL, "--json")
    assert simulated(capsys, trace, *SMALL, "--json") == first
    summary = json.loads(first[1])
    assert (summary["policy"], summary["seed"], summary["served"]) == ("dynamo-1.0", 0, 40)


def test_physics_disturb_engines_and_are_named(capsys, trace):
    plain = simulated(capsys, trace, *SMALL, "--json")
    status, out, _ = simulated(capsys, trace, *SMALL, "--physics", "noise", "--json")
    assert (status, json.loads(out)["served"]) == (0, 40)
    assert out != plain[1]
    _, out, _ = simulated(capsys, trace, "--physics", "mocker-2", "--policies", "lmetric")
    assert "workers: 2 of NVIDIA's mocker" in out
    assert "physics: NVIDIA's replay timing" in out


def test_options_of_policies_count(capsys, trace):
    names = "dynamo-1.0:overlap_score_weight=4 dynamo-1.0:overlap_score_weight=0.1"
    _, out, _ = simulated(capsys, trace, *SMALL, "--policies", names, "--json")
    summaries = [json.loads(line) for line in out.splitlines()]
    assert [summary.pop("policy") for summary in summaries] == names.split()
    assert summaries[0] != summaries[1]


def test_closed_loop_has_columns_of_its_sessions(capsys):
    loop = "rollouts:groups=3,prompts=4,least_prompt_tokens=2000,most_prompt_tokens=9000"
    status, out, _ = simulated(capsys, loop, *SMALL)
    assert status == 0
    assert "12 requests of 3 sessions that begin within 4 s" in out
    assert "session mean (ms)" in out
    assert "prefixes computed" in out
    assert "makespan (ms)" in out
    _, out, _ = simulated(capsys, "long-tail:requests=20", *SMALL)
    assert "session" not in out


def test_deferred_admission_computes_equal_prompts_once(capsys):
    def computed(*arguments):
        loop = "rollouts:groups=2,prompts=8,at_once=1"
        _, out, _ = simulated(capsys, loop, *SMALL, *arguments, "--json")
        return json.loads(out)["prefixes_computed"]

    assert computed() == 8.0
    assert computed("--physics", "deferring") == 2.0


def test_incidents_models_and_limits(capsys, trace, tmp_path):
    model = tmp_path / "model.json"
    constants = ("base_s", "prefill_token_s", "decode_request_s", "decode_kv_token_s")
    fields = {**dict.fromkeys(constants, 1e-4), "attention_token2_s": 1e-9}
    model.write_text(json.dumps({**fields, "chunk_tokens": 64, "capacity_tokens": 99_000}))
    incidents = "slow:at_s=0,worker=1,slowness=3 fail:at_s=0.3,worker=0,down_s=0.2"
    status, out, _ = simulated(
        capsys, trace, *SMALL[:2], "--models", f"8b {model}", "--policies", "dynamo-1.0",
        "--incidents", incidents, "--limit", 20, "--json",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["served"] == 20
    assert json.loads(out)["retried"] > 0


@pytest.mark.parametrize("name", ["shared-prompts:requests=30,prompts=3", "long-tail:requests=30"])
def test_workloads(capsys, name):
    _, out, _ = simulated(capsys, name, *SMALL, "--json", "--block-size", 64)
    assert json.loads(out)["served"] == 30


def test_a_recording_is_replayed_under_other_policies(capsys, tmp_path):
    path = tmp_path / "life.jsonl"
    path.write_bytes(small().recording)
    status, out, err = simulated(
        capsys, path, "--policies", "recorded recorded:overlap_score_weight=0.2", "--json"
    )
    assert (status, err) == (0, "")
    summaries = [json.loads(line) for line in out.splitlines()]
    assert summaries[0]["served"] == summaries[1]["served"] == 1
    assert summaries[0]["policy"] == "recorded"


class _Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []
        self.open = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_needs_nothing_but_itself(capsys, trace, tmp_path):
    page = tmp_path / "report.html"
    names = "dynamo-1.0 dynamo-1.0:overlap_score_weight=4"
    status, _, _ = simulated(
        capsys, trace, *SMALL, "--policies", names, "--speeds", "1 9", "--html", page
    )
    text = page.read_text()
    seen = _Seen()
    seen.feed(text)
    assert status == 0
    assert seen.open == []
    assert not re.search(r"https?://|url\(|@import|<script|src=|href=", text)
    assert "prefers-color-scheme: dark" in text
    lines = [attributes for tag, attributes in seen.tags if tag == "polyline"]
    assert len(lines) == 2 * 2 * 5  # speeds, policies, plots
    for line in lines:
        assert re.fullmatch(r"(-?\d+\.\d,\d+\.\d ?)+", line["points"])
    assert text.count("overlap_score_weight=4</td>") == 2
    assert "<dt>seeds</dt><dd>0</dd>" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "trace: missing"),
        (["nowhere.jsonl"], "No such file"),
        (["TRACE", "--policies", "dynamo-1.0:what=1"], "policies: what in"),
        (["TRACE", "--policies", "dynamo-1.0:overlap_score_weight=x"], "overlap_score_weight"),
        (["TRACE", "--policies", "dynamo-1.0:overlap_score_weight"], "NAME:key=value"),
        (["TRACE", "--policies", "no-such-policy"], "no-such-policy"),
        (["TRACE", "--policies", " "], "policies: empty"),
        (["TRACE", "--speeds", "0"], "speeds"),
        (["TRACE", "--seeds", "1.5"], "seeds"),
        (["TRACE", "--models", "9000b"], "models: 9000b"),
        (["TRACE", "--physics", "magic"], "physics: 'magic' (allowed: plain, 8b, mocker-16,"),
        (["TRACE", "--physics", "warm-up", "--workers", "3"], "workers: 3 with physics 'warm-up'"),
        (["TRACE", "--models", "TRACE"], "models"),
        (["TRACE", "--incidents", "slow:at_s=1,worker=16,slowness=2"], "worker 0 to 15"),
        (["TRACE", "--incidents", "melt:at_s=1"], "slow:… or fail:…"),
        (["TRACE", "--incidents", "slow:worker=1"], "at_s"),
        (["agents:reqests=3"], "reqests"),
        (["rollouts:prompt=8"], "unknown field `prompt`"),
        (["agentic-code:median_new_tokens=5000"], "less than the median 5000"),
    ],
)
def test_invalid_options_are_refused_before_the_run(capsys, trace, arguments, said):
    given = [str(trace) if each == "TRACE" else each for each in arguments]
    status, out, err = simulated(capsys, *given)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("kv-router simulate: ")


def test_a_malformed_trace_names_the_line(capsys, trace):
    trace.write_text(trace.read_text() + '{"timestamp": 9}\n')
    status, _, err = simulated(capsys, trace)
    assert status == 2
    assert f"{trace}: line 41: " in err


def test_unwritable_report_is_an_error(capsys, trace, tmp_path):
    status, _, err = simulated(capsys, trace, *SMALL, "--html", tmp_path / "no" / "x.html")
    assert status == 1
    assert "No such file" in err

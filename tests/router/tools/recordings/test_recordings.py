"""`kv-router replay`, and what `kv-router record` refuses."""

import json
import re
import time

import pytest

from router.cli import main
from router.core.commands import (
    Apply,
    Decision,
    PrefillComplete,
    Reserve,
    SelectAndReserve,
    Tick,
    UpsertWorker,
)
from router.errors import ConfigError
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import Rank, Tier
from router.publisher.journal.journal import EventJournal
from router.recording.entries import Entry
from router.recording.format import End, Hole, Line, encode_header, encode_line
from router.sequence.active.prompt import prepare
from router.tools.recordings.arguments import load_record_config
from support.fleets.recordings import RandomLife, Recorded, small
from support.values.builders import IDENTITY, announcement


@pytest.fixture
def path(tmp_path):
    return tmp_path / "life.jsonl"


@pytest.fixture
def life():
    return RandomLife(4, router_temperature=0.2).live(60)


def replay(capsys, path, *flags):
    """Exit status, what was printed, and what was complained about."""
    status = main(["replay", str(path), *flags])
    return status, *capsys.readouterr()


def decisions(life):
    return sum(
        isinstance(each, Entry) and isinstance(each.command, Decision) for each in life.entries
    )


def test_all_decisions_are_equal(capsys, path, life):
    life.entries.append(End("seconds"))
    path.write_bytes(life.recording)
    status, printed, _ = replay(capsys, path)
    count = decisions(life)
    assert f"decisions: {count} of {count} equal" in printed
    assert f"{len(life.entries)} lines of" in printed
    assert "the recording was ended: seconds" in printed
    assert status == 0


def test_result_is_available_as_json(capsys, path, life):
    path.write_bytes(life.recording)
    status, printed, _ = replay(capsys, path, "--json")
    count = decisions(life)
    result = json.loads(printed)
    assert (status, result["decisions"], result["equal"], result["problem"]) == (
        0,
        count,
        count,
        None,
    )
    assert result["recorded"] == result["now"]


@pytest.fixture
def busy():
    """Worker 1 holds a prompt of 10 blocks, and is busy; worker 2 is neither."""
    recorded, prompt = Recorded(policy="dynamo-1.0"), list(range(40))
    hashed = prepare(SelectRequest(token_ids=prompt), ()).hashed(IDENTITY)
    for worker_id in (1, 2):
        recorded.core.handle(UpsertWorker(announcement(worker_id, agent_is_engine=False)), 0.0)
    journal = EventJournal(Rank(1, 0), 1, IDENTITY)
    journal.stored(Tier.DEVICE, hashed.sequence_hashes.tolist(), None)
    for message in journal.take():
        recorded.core.handle(Apply(message), 0.25)
    long = ReserveRequest(token_ids=list(range(1000, 1100)), worker_id=1, request_id="long")
    recorded.core.handle(Reserve(long, prepare(long, ())), 0.5)
    recorded.core.handle(PrefillComplete("long"), 0.75)
    asked = SelectRequest(token_ids=prompt, request_id="r1")
    recorded.core.handle(SelectAndReserve(asked, prepare(asked, ())), 1.0)
    return recorded


def test_differing_decision_is_explained_and_fails(capsys, path, busy):
    path.write_bytes(busy.recording.replace(b'"rank":[2,0]', b'"rank":[1,0]'))
    status, printed, _ = replay(capsys, path)
    assert printed.endswith(
        "decisions: 1 of 2 equal\n"
        "  line 7, +1.250 s, select_and_reserve r1, 40 tokens\n"
        "    recorded    rank 1.0: cost 20.00, 0 tokens cached, with it 40 tokens to prefill and "
        "10 blocks to decode\n"
        "    now         rank 2.0: cost 20.00, 0 tokens cached, with it 40 tokens to prefill and "
        "10 blocks to decode\n"
        "    instead of  rank 1.0: cost 35.00, 36 tokens cached, with it 0 tokens to prefill and "
        "35 blocks to decode\n"
    )
    assert status == 1


def test_differing_other_candidates_are_reported(capsys, path, busy):
    digest = re.compile(rb'"digest":"[0-9a-f]*"')
    path.write_bytes(digest.sub(b'"digest":"0123"', busy.recording))
    status, printed, _ = replay(capsys, path)
    assert "decisions: 1 of 2 equal" in printed
    assert printed.endswith("    the rank is the same; what the other candidates cost is not\n")
    assert status == 1


def test_other_settings_are_scored(capsys, path, busy):
    path.write_bytes(busy.recording)
    status, printed, _ = replay(capsys, path, "--overlap-score-weight", "50")
    assert "  overlap_score_weight: 1.0, now 50.0\n" in printed
    assert "choices: 1 of 1 of another rank (100.0%)" in printed
    assert re.search(r"^tokens predicted to be cached +0 +36 +-$", printed, re.MULTILINE)
    assert re.search(r"^prefill tokens, the chosen rank +40 +0 +-100.0%$", printed, re.MULTILINE)
    assert re.search(r"^decode blocks, the chosen rank +10 +35 +\+250.0%$", printed, re.MULTILINE)
    assert printed.endswith(
        "  line 7, +1.250 s, select_and_reserve r1, 40 tokens\n"
        "    recorded    rank 2.0: cost 20.00, 0 tokens cached, with it 40 tokens to prefill and "
        "10 blocks to decode\n"
        "    now         rank 1.0: cost 35.00, 36 tokens cached, with it 0 tokens to prefill and "
        "35 blocks to decode\n"
        "    instead of  rank 2.0: cost 510.00, 0 tokens cached, with it 40 tokens to prefill and "
        "10 blocks to decode\n"
    )
    assert status == 0


def test_limit_ends_the_replay(capsys, path, life):
    path.write_bytes(life.recording)
    status, printed, _ = replay(capsys, path, "--limit", "30")
    assert "30 lines of" in printed
    assert "has no end" not in printed
    assert status == 0


def test_paced_replay_keeps_gaps_and_prints_decisions(capsys, path, life):
    entries = [each for each in life.entries if hasattr(each.command, "request")]
    lines = [encode_line(Line(2.0 * i, each)) for i, each in enumerate(entries[:3])]
    path.write_bytes(encode_header(life.header) + b"".join(lines))
    start_s = time.monotonic()
    _, printed, _ = replay(capsys, path, "--speed", "10")
    assert time.monotonic() - start_s >= 0.4
    assert re.search(r"line 3, \+2\.000 s, \w+ [rs]\d+", printed)
    assert "refused (no_endpoints)" in printed


def test_decisions_after_a_hole_are_not_compared(capsys, path, life):
    before = decisions(life)
    life.entries.append(Hole(3))
    lost = RandomLife(5).live(60)
    life.entries += lost.entries
    path.write_bytes(life.recording)
    status, printed, _ = replay(capsys, path)
    assert f"decisions: {before} of {before} equal" in printed
    assert f"3 records are missing, they came faster than they were written; {decisions(lost)}" in (
        printed
    )
    assert status == 0


def test_a_recording_cut_off_anywhere_is_replayed_up_to_there(capsys, path):
    recording = small().recording
    header_end = recording.index(b"\n")
    for size in range(0, len(recording), 19):
        path.write_bytes(recording[:size])
        status, printed, complaint = replay(capsys, path)
        if size < header_end:
            assert status == 2
            assert f"{path}: line 1: the file " in complaint
            continue
        line = recording.count(b"\n", 0, size) + 1
        is_whole = recording[size : size + 1] == b"\n" or recording[size - 1 : size] == b"\n"
        said = f"line {line}: the file ends within this line; the {line - 2} lines before it were"
        assert (said in printed) == (not is_whole)
        assert ("has no end" in printed) == is_whole
        is_empty = is_whole and b'"outcome"' not in recording[:size]
        assert status == (2 if is_empty else 0)


def test_damaged_line_ends_the_replay_with_an_error(capsys, path, life):
    lines = life.recording.splitlines(keepends=True)
    lines[20] = lines[20][:-20] + b"\n"
    path.write_bytes(b"".join(lines))
    status, printed, _ = replay(capsys, path)
    assert "line 21: " in printed
    assert "; the 19 lines before it were replayed" in printed
    assert status == 1


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (None, "FILE: .*No such file"),
        (b"", "line 1: the file is empty"),
        (b"\x00\x01", "line 1: the file does not begin like a recording"),
        (b'{"format":"kv-router recording","version":1}\n', "version 1; .* reads version 2"),
    ],
)
def test_file_that_is_no_recording_is_refused(capsys, path, contents, complaint):
    if contents is not None:
        path.write_bytes(contents)
    status, _, said = replay(capsys, path)
    assert re.search(complaint, said)
    assert status == 2


def test_a_folder_is_no_recording(capsys, tmp_path):
    status, _, said = replay(capsys, tmp_path)
    assert "Is a directory" in said
    assert status == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--router-temperature", "-1"], "--router-temperature: '-1'"),
        (["--overlap-score-weight", "much"], "--overlap-score-weight: 'much'"),
    ],
)
def test_settings_out_of_range_are_refused(capsys, path, life, flags, complaint):
    path.write_bytes(life.recording)
    status, _, said = replay(capsys, path, *flags)
    assert complaint in said
    assert status == 2


@pytest.mark.parametrize("flags", [["--speed", "-1"], ["--limit", "x"], ["--http-port", "1"], []])
def test_a_wrong_command_line_ends_the_process(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *(["x"] if flags else []), *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("kv-router replay: ")


def test_other_product_version_is_reported(capsys, path):
    recorded = Recorded()
    recorded.entries.append(Entry(Tick(), 1.0))
    path.write_bytes(recorded.recording)
    _, printed, _ = replay(capsys, path)
    assert "by kv-router 0\nreplayed by kv-router 0.1.0, which may decide differently" in printed


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([], "output"),
        (["--output", "x", "--event-threads", "2"], "event_threads"),
        (["--output", "x", "--max-bytes", "10"], "max_bytes"),
        (["--output", "x", "--seconds", "-1"], "seconds"),
        (["--output", "x", "--max-records", "few"], "max_records"),
    ],
)
def test_unrecordable_setting_is_refused_by_name(flags, key):
    with pytest.raises(ConfigError) as caught:
        load_record_config(flags, {})
    assert caught.value.key == key


def test_a_recorded_router_has_the_settings_of_others():
    environment = {"KV_ROUTER_NATS_URL": "nats://elsewhere", "KV_ROUTER_OUTPUT": "file"}
    config = load_record_config(["--router-temperature", "0.5"], environment)
    router = config.router
    assert (router.bus.nats_url, router.policy.router_temperature) == ("nats://elsewhere", 0.5)
    assert (config.output, config.seconds) == ("file", 0.0)


def test_replay_of_a_recording_without_decisions_is_an_error(capsys, path):
    recorded = Recorded()
    recorded.entries += [Entry(Tick(), 1.0), End("stopped")]
    path.write_bytes(recorded.recording)
    status, _, said = replay(capsys, path)
    assert said == (
        f"kv-router replay: {path}: it has no decision to compare: no caller asked the recorded "
        "router\n"
    )
    assert status == 2


def test_inspection_counts_the_contents(capsys, path, life):
    life.entries += [Hole(3), End("seconds")]
    path.write_bytes(life.recording)
    assert main(["inspect", "--json", "recording", str(path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["decisions"], summary["ended"]) == (decisions(life), "seconds")
    assert summary["entries"] == len(life.entries) - 2
    assert [(gap["missing"], gap["cause"]) for gap in summary["gaps"]] == [(3, "overload")]
    assert main(["inspect", "recording", str(path)]) == 0
    assert f"of which {decisions(life)} decisions" in capsys.readouterr().out


@pytest.mark.parametrize("contents", [None, b"", b"foreign"])
def test_inspection_of_no_recording_is_an_error(capsys, path, contents):
    if contents is not None:
        path.write_bytes(contents)
    assert main(["inspect", "recording", str(path)]) == 1
    assert str(path) in capsys.readouterr().err

"""Entries reach the file, or are counted as missing; no command waits for the disk."""

import resource
import stat
import threading
from io import BytesIO

import pytest
from msgspec.structs import replace

from router.core.commands import Free, OrderWorker, Select, Tick, UpsertWorker
from router.observability.recorder import Recorder, RecordingLimits
from router.protocol.requests import SelectRequest
from router.recording.entries import Entry, RecordedResult
from router.recording.format import End, Hole, decode_header, decode_lines
from router.tools.recordings.parts import OpenRecording
from support.fleets.recordings import header
from support.processes.servers import eventually
from support.values.builders import announcement


@pytest.fixture
def path(tmp_path):
    return tmp_path / "recording.jsonl"


@pytest.fixture
def ended():
    return threading.Event()


@pytest.fixture
def recorder(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(), ended.set)
    yield recorder
    recorder.close()


def read(path):
    file = BytesIO(path.read_bytes())
    decode_header(file.readline())
    return [line.entry for _, line in decode_lines(file)]


def test_closed_recording_contains_all_commands(path, recorder, ended):
    for i in range(1000):
        recorder.take(Entry(Tick(), float(i)))
    recorder.close()
    assert read(path) == [*(Entry(Tick(), float(i)) for i in range(1000)), End("stopped")]
    assert (recorder.records, recorder.missing, recorder.waiting_bytes) == (1000, 0, 0)
    assert recorder.written_bytes == path.stat().st_size
    assert ended.is_set()


async def test_a_killed_process_leaves_nearly_all(path, recorder):
    recorder.take(Entry(Tick(), 1.0))
    await eventually(lambda: _has(path, Entry(Tick(), 1.0)))


async def _has(path, entry):
    return path.stat().st_size > 0 and entry in read(path)


def test_the_file_is_the_owners_alone_since_prompts_are_in_it(path, recorder):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_moments_are_relative_and_never_go_back(path, ended):
    now_s = iter([100.0, 100.5, 101.25, 103.0])
    recorder = Recorder(path, header(), RecordingLimits(), ended.set, clock=lambda: next(now_s))
    recorder.take(Entry(Tick(), 100.4))
    recorder.take(Entry(Free("a"), 0.0))
    recorder.close()
    file = BytesIO(path.read_bytes())
    file.readline()
    assert [line.at_s for _, line in decode_lines(file)] == [0.5, 1.25, 3.0]


@pytest.mark.parametrize("name", ["recording.jsonl", "no/such/folder/recording.jsonl"])
def test_a_file_that_is_there_is_not_overwritten(tmp_path, ended, name):
    (tmp_path / "recording.jsonl").write_text("precious")
    with pytest.raises(OSError, match=name):
        Recorder(tmp_path / name, header(), RecordingLimits(), ended.set)
    assert (tmp_path / "recording.jsonl").read_text() == "precious"


def test_a_limit_on_records_ends_it(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(max_records=3), ended.set)
    for i in range(10):
        recorder.take(Entry(Tick(), float(i)))
    assert ended.wait(60)
    recorder.close()
    assert read(path) == [
        Entry(Tick(), 0.0),
        Entry(Tick(), 1.0),
        Entry(Tick(), 2.0),
        End("max_records"),
    ]


def test_a_limit_on_bytes_is_never_exceeded(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(max_bytes=5000), ended.set)
    for i in range(1000):
        recorder.take(Entry(Tick(), float(i)))
    recorder.close()
    assert 4500 < path.stat().st_size <= 5000
    entries = read(path)
    assert entries[-1] == End("max_bytes")
    assert entries[:-1] == [Entry(Tick(), float(i)) for i in range(len(entries) - 1)]


def test_overload_leaves_a_hole(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(), ended.set, queue_bytes=5000)
    reported = 0
    while recorder.missing < 100:
        recorder.take(Entry(Tick(), float(reported)))
        reported += 1
        assert recorder.waiting_bytes <= 5000
    missing = recorder.missing
    while recorder.waiting_bytes:
        threading.Event().wait(0.01)
    recorder.take(Entry(Tick(), -1.0))
    recorder.close()
    entries = read(path)
    assert entries[-2:] == [Entry(Tick(), -1.0), End("stopped")]
    assert sum(each.missing for each in entries if isinstance(each, Hole)) == missing
    assert sum(isinstance(each, Entry) for each in entries) == reported + 1 - missing
    assert entries[:20] == [Entry(Tick(), float(i)) for i in range(20)]


def test_hole_at_the_end_is_recorded(path, recorder):
    recorder.take(Entry(OrderWorker(1, "\ud800")))
    recorder.close()
    assert read(path) == [Hole(1), End("stopped")]


def test_unencodable_command_becomes_a_hole(path, recorder):
    recorder.take(Entry(Tick(), 1.0))
    recorder.take(Entry(Free("\ud800"), 0.0))
    recorder.take(Entry(Tick(), 2.0))
    recorder.close()
    assert read(path) == [Entry(Tick(), 1.0), Hole(1), Entry(Tick(), 2.0), End("stopped")]


def test_a_full_disk_is_survived(path, recorder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    request = SelectRequest(token_ids=[7] * 9999)
    long = Entry(Select(request), 0.0, RecordedResult(refused="x"))
    try:
        recorder.take(long)
        _until(lambda: recorder.failure)
        assert recorder.failure.strerror == "File too large"
        assert path.stat().st_size == 4096
        recorder.take(Entry(Tick(), 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _until(lambda: not recorder.waiting_bytes)
    recorder.close()
    assert read(path) == [long, Entry(Tick(), 1.0), End("stopped")]
    assert recorder.failure is None


def test_a_disk_that_stays_full_ends_the_wait(path, ended):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        recorder = Recorder(path, header(), RecordingLimits(), ended.set)
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert recorder.failure.strerror == "File too large"
    assert path.stat().st_size == 100


def _until(condition):
    while not condition():
        threading.Event().wait(0.01)


IN_PARTS = RecordingLimits(max_bytes=40_000, part_bytes=5_000)


def in_parts(path, entries, **options):
    recorder = Recorder(path, header(), IN_PARTS, lambda: None, **options)
    for entry in entries:
        recorder.take(entry)
    recorder.close()
    return recorder


TICKS = [Entry(Tick(), float(i)) for i in range(2000)]


def test_parts_are_bounded_and_the_oldest_are_deleted(path):
    recorder = in_parts(path, TICKS)
    files = list(path.parent.iterdir())
    assert recorder.rotations > len(files)
    assert sum(each.stat().st_size for each in files) <= IN_PARTS.max_bytes
    assert all(each.stat().st_size <= IN_PARTS.part_bytes for each in files)
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    assert recorder.records == 2000
    last = OpenRecording(path)
    with last:
        lines = [line.entry for _, line in last.lines()]
    assert len(last.paths) == len(files)
    assert lines[0] == Hole(last.header.before, "rotated")
    assert lines[1:] == [*TICKS[last.header.before :], End("stopped")]


def test_parts_are_read_as_one_file(path):
    in_parts(path, TICKS[:200])
    count = len(list(path.parent.iterdir()))
    assert count > 1
    with OpenRecording(path) as recording:
        numbered = list(recording.lines())
    assert [line.entry for _, line in numbered] == [*TICKS[:200], End("stopped")]
    assert numbered[-1][0] == 201 + count
    first = path.with_name(f"{path.name}.1")
    with OpenRecording(first) as recording:
        assert [line.entry for _, line in recording.lines()] == TICKS[
            : len(first.read_bytes().split(b"\n")) - 2
        ]


def test_a_part_without_those_before_has_the_fleet_of_its_start(path):
    fleet = (announcement(1), announcement(2))
    in_parts(path, TICKS[:200], renewed=lambda part: replace(part, now_s=7.0, workers=fleet))
    path.with_name(f"{path.name}.1").unlink()
    with OpenRecording(path) as recording:
        lines = [line.entry for _, line in recording.lines()]
    hole, *workers = lines[:3]
    assert hole == Hole(recording.header.before, "rotated")
    assert workers == [Entry(UpsertWorker(each), 7.0) for each in fleet]


def test_a_former_recording_is_kept_as_a_part(path):
    in_parts(path, TICKS[:10])
    recorder = Recorder(path, header(seed=8), IN_PARTS, lambda: None)
    recorder.close()
    assert read(path) == [End("stopped")]
    assert read(path.with_name(f"{path.name}.1")) == [*TICKS[:10], End("stopped")]


def test_an_entry_larger_than_a_part_becomes_a_hole(path):
    long = Entry(Select(SelectRequest(token_ids=[7] * 9999)), 0.0, RecordedResult(refused="x"))
    recorder = in_parts(path, [TICKS[0], long, TICKS[1]])
    assert read(path) == [TICKS[0], Hole(1), TICKS[1], End("stopped")]
    assert (recorder.records, recorder.missing) == (2, 1)

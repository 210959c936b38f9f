"""Entries reach the file, or are counted as missing; no command waits for the disk."""

import resource
import stat
import threading
from io import BytesIO

import pytest

from router.core.commands import Free, OrderWorker, Select, Tick
from router.errors import ConfigError
from router.observability.recorder import Recorder, RecordingLimits
from router.protocol.requests import SelectRequest
from router.recording.entries import Entry, RecordedResult
from router.recording.format import End, Hole, decode_header, decode_lines
from support.fleets.recordings import header
from support.processes.servers import eventually


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
    with pytest.raises(ConfigError, match="output"):
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


def test_a_file_that_cannot_grow_ends_it(path, ended):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        recorder = Recorder(path, header(), RecordingLimits(), ended.set)
        request = SelectRequest(token_ids=[7] * 9999)
        recorder.take(Entry(Select(request), 0.0, RecordedResult(refused="x")))
        assert ended.wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder.take(Entry(Tick(), 1.0))
    recorder.close()
    assert recorder.failure.strerror == "File too large"
    assert (recorder.records, path.stat().st_size) == (1, 4096)

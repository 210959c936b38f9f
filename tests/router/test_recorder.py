"""Entries reach the file, or are counted as missing; nobody ever waits for the disk."""

import resource
import stat
import threading
from io import BytesIO

import pytest

from recordings import header
from router.errors import ConfigError
from router.protocol.requests import SelectRequest
from router.recorder import Recorder, RecordingLimits
from router.recording.commands import Free, OrderWorker, Tick
from router.recording.decisions import Outcome, Select
from router.recording.format import End, Hole, decode_header, decode_lines
from servers import eventually


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


def test_what_was_taken_is_in_the_file_when_closed(path, recorder, ended):
    for i in range(1000):
        recorder.take(Tick(float(i)))
    recorder.close()
    assert read(path) == [*(Tick(float(i)) for i in range(1000)), End("stopped")]
    assert (recorder.records, recorder.missing, recorder.waiting_bytes) == (1000, 0, 0)
    assert recorder.written_bytes == path.stat().st_size
    assert ended.is_set()


async def test_a_killed_process_leaves_nearly_all(path, recorder):
    recorder.take(Tick(1.0))
    await eventually(lambda: _has(path, Tick(1.0)))


async def _has(path, entry):
    return path.stat().st_size > 0 and entry in read(path)


def test_the_file_is_the_owners_alone_since_prompts_are_in_it(path, recorder):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_moments_are_relative_and_never_go_back(path, ended):
    now_s = iter([100.0, 100.5, 101.25, 103.0])
    recorder = Recorder(path, header(), RecordingLimits(), ended.set, clock=lambda: next(now_s))
    recorder.take(Tick(100.4))
    recorder.take(Free("a", 0.0))
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
        recorder.take(Tick(float(i)))
    assert ended.wait(60)
    recorder.close()
    assert read(path) == [Tick(0.0), Tick(1.0), Tick(2.0), End("max_records")]


def test_a_limit_on_bytes_is_never_exceeded(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(max_bytes=5000), ended.set)
    for i in range(1000):
        recorder.take(Tick(float(i)))
    recorder.close()
    assert 4500 < path.stat().st_size <= 5000
    entries = read(path)
    assert entries[-1] == End("max_bytes")
    assert entries[:-1] == [Tick(float(i)) for i in range(len(entries) - 1)]


def test_what_comes_faster_than_it_is_written_leaves_a_hole(path, ended):
    recorder = Recorder(path, header(), RecordingLimits(), ended.set, queue_bytes=5000)
    told = 0
    while recorder.missing < 100:
        recorder.take(Tick(float(told)))
        told += 1
        assert recorder.waiting_bytes <= 5000
    missing = recorder.missing
    while recorder.waiting_bytes:
        threading.Event().wait(0.01)
    recorder.take(Tick(-1.0))
    recorder.close()
    entries = read(path)
    assert entries[-2:] == [Tick(-1.0), End("stopped")]
    assert sum(each.missing for each in entries if isinstance(each, Hole)) == missing
    assert sum(isinstance(each, Tick) for each in entries) == told + 1 - missing
    assert entries[:20] == [Tick(float(i)) for i in range(20)]


def test_a_hole_at_the_end_is_told_too(path, recorder):
    recorder.take(OrderWorker(1, "\ud800"))
    recorder.close()
    assert read(path) == [Hole(1), End("stopped")]


def test_what_cannot_be_written_down_is_missing_and_harms_nobody(path, recorder):
    recorder.take(Tick(1.0))
    recorder.take(Free("\ud800", 0.0))
    recorder.take(Tick(2.0))
    recorder.close()
    assert read(path) == [Tick(1.0), Hole(1), Tick(2.0), End("stopped")]


def test_a_file_that_cannot_grow_ends_it(path, ended):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        recorder = Recorder(path, header(), RecordingLimits(), ended.set)
        recorder.take(Select(SelectRequest(token_ids=[7] * 9999), 0.0, Outcome(refused="x")))
        assert ended.wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder.take(Tick(1.0))
    recorder.close()
    assert recorder.failure.strerror == "File too large"
    assert (recorder.records, path.stat().st_size) == (1, 4096)

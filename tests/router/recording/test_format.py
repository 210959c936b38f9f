"""A recording can be read up to where it is whole, and says where that is."""

import pytest

from router.core.commands import Tick
from router.recording.entries import Entry
from router.recording.format import (
    LINE_LIMIT_BYTES,
    VERSION,
    Line,
    RecordingError,
    decode_header,
    decode_lines,
    encode_line,
)
from support.fleets.recordings import RandomLife, replayed, small


def life():
    """Small, and with every kind of line that a router's first seconds have."""
    return RandomLife(11).live(25)


def read(recording):
    """How many lines can be read before the error."""
    lines = recording.splitlines(keepends=True)
    decode_header(lines[0] if lines else b"")
    count = 0
    try:
        for count, _ in enumerate(decode_lines(lines[1:]), start=1):  # noqa: B007
            pass
    except RecordingError as error:
        return count, error
    return count, None


def test_a_recording_cut_off_anywhere_is_read_up_to_there():
    recording = small().recording
    header_bytes = recording.index(b"\n")
    for size in range(len(recording) + 1):
        part = recording[:size]
        if size < header_bytes:
            with pytest.raises(RecordingError) as caught:
                read(part)
            assert (caught.value.line, caught.value.problem) == (1, "cut off" if size else "empty")
            continue
        count, error = read(part)
        whole = part.count(b"\n") - 1
        if part.endswith(b"\n"):
            assert all(each.is_equal for each in replayed(part)[1])
        assert count in (max(whole, 0), whole + 1)
        if error is not None:
            assert (error.problem, error.line) == ("cut off", count + 2)
            assert str(error) == f"line {count + 2}: the file ends within this line"


@pytest.mark.parametrize(
    "damage",
    [
        b"{}\n",
        b"\n",
        b"\0\0\0\n",
        b'{"at_s":1,"entry":{"kind":"dance"}}\n',
        b"\xff\n",
        b"[" * 99999,
    ],
)
def test_a_damaged_line_is_named(damage):
    lines = life().recording.splitlines(keepends=True)
    lines[7] = damage + b"\n"
    count, error = read(b"".join(lines))
    assert (count, error.line, error.problem) == (6, 8, "damaged")


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (b"", "empty"),
        (b"hello\n", "foreign"),
        (b"\x89PNG\r\n", "foreign"),
        (b'{"event": 1}\n', "foreign"),
        (b'{"format":"something else","version":1}\n', "foreign"),
        (b'{"format":"kv-router recording","version":%d}\n' % (VERSION + 1), "version"),
        (b'{"format":"kv-router recording","version":%d}\n' % VERSION, "damaged"),
    ],
)
def test_invalid_recording_is_refused(first, problem):
    with pytest.raises(RecordingError, match="line 1") as caught:
        decode_header(first)
    assert caught.value.problem == problem


def test_another_version_is_named():
    with pytest.raises(RecordingError, match=r"version 9; this kv-router reads version 2"):
        decode_header(b'{"format":"kv-router recording","version":9,"new":[]}\n')


def test_a_line_is_json_of_its_own():
    assert (
        encode_line(Line(1.25, Entry(Tick(), 7.5)))
        == b'{"at_s":1.25,"entry":{"kind":"tick","now_s":7.5}}\n'
    )


def test_overlong_line_differs_from_a_torn_one():
    with pytest.raises(RecordingError, match="line 2: longer than 67108864 bytes") as caught:
        list(decode_lines([b" " * LINE_LIMIT_BYTES]))
    assert caught.value.problem == "too long"

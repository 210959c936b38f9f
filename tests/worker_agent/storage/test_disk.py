"""Blocks in a file: what is written is read, and errors are per block."""

import errno
import os
import resource
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chaos.fuzzing import examples
from worker_agent.storage import disk
from worker_agent.storage.disk import DiskStorage, Reserved, aligned_buffer
from worker_agent.storage.errors import StorageError

BLOCK_BYTES = 5000
STRIDE = 8192


@pytest.fixture
def storage(tmp_path):
    of = DiskStorage(tmp_path / "blocks", 8, BLOCK_BYTES)
    yield of
    of.close()


def buffers(count):
    return [aligned_buffer(STRIDE) for _ in range(count)]


def numbered(numbers):
    """A stride full of each number."""
    strides = buffers(len(numbers))
    for stride, number in zip(strides, numbers, strict=True):
        stride[:] = bytes([number]) * STRIDE
    return strides


def read(storage, blocks):
    strides = buffers(len(blocks))
    assert storage.read(blocks, strides) == [None] * len(blocks)
    assert all(len(set(stride)) == 1 for stride in strides)
    return [stride[0] for stride in strides]


places = st.lists(st.integers(0, 7), unique=True, max_size=8)


@settings(max_examples=examples(30))
@given(writes=st.lists(places, max_size=4), wanted=st.lists(st.integers(0, 7), max_size=10))
def test_written_bytes_are_read_back(tmp_path_factory, writes, wanted):
    of = DiskStorage(tmp_path_factory.mktemp("disk") / "blocks", 8, BLOCK_BYTES)
    model = dict.fromkeys(range(8), 0)
    for turn, blocks in enumerate(writes, 1):
        numbers = [turn * 16 + block for block in blocks]
        assert of.write(blocks, numbered(numbers)) == [None] * len(blocks)
        model.update(zip(blocks, numbers, strict=True))
    assert read(of, wanted) == [model[block] for block in wanted]
    of.close()


def test_disk_blocks_are_found_again(tmp_path):
    path = tmp_path / "blocks"
    first = DiskStorage(path, 8, BLOCK_BYTES)
    first.write([3], numbered([77]))
    with pytest.raises(StorageError, match="not locked by another process"):
        DiskStorage(path, 8, BLOCK_BYTES)
    first.close()
    second = DiskStorage(path, 8, BLOCK_BYTES)
    assert read(second, [3]) == [77]
    second.close()
    second.remove()
    assert not path.exists()


def test_adjacent_blocks_are_one_call(storage, monkeypatch):
    calls, preadv = [], os.preadv
    monkeypatch.setattr(disk.os, "preadv", lambda *a: calls.append(a[2]) or preadv(*a))
    read(storage, [4, 5, 6, 2, 3, 0])
    assert calls == [4 * STRIDE, 2 * STRIDE, 0]


def test_partial_io_is_continued(storage, monkeypatch):
    storage.write([2, 3, 4], numbered([1, 2, 3]))
    preadv = os.preadv

    def a_page_or_two(descriptor, parts, offset):
        return preadv(descriptor, [parts[0][:4096]], offset)

    monkeypatch.setattr(disk.os, "preadv", a_page_or_two)
    assert read(storage, [2, 3, 4]) == [1, 2, 3]


def test_room_is_reserved(storage):
    assert storage.abilities.reserved is Reserved.ALLOCATED
    assert os.stat(storage.path).st_blocks * 512 >= 8 * STRIDE


def test_truncated_file_fails_its_lost_blocks(storage):
    storage.write([4, 5, 6], numbered([1, 2, 3]))
    os.truncate(storage.path, 6 * STRIDE)
    strides = buffers(4)
    errors = storage.read([4, 5, 6, 7], strides)
    assert [error and error.errno for error in errors] == [None, None, errno.EIO, errno.EIO]
    assert (strides[0][0], strides[1][0]) == (1, 2)


def test_full_disk_fails_the_unwritten_blocks(storage):
    os.truncate(storage.path, 0)  # what a sparse file is
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * STRIDE, limit[1]))
    try:
        errors = storage.write([0, 1, 2, 3], numbered([1, 2, 3, 4]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert [error and error.errno for error in errors] == [None, None, errno.EFBIG, errno.EFBIG]
    assert read(storage, [0, 1]) == [1, 2]


def test_odd_blocks_and_buffers_are_refused(storage):
    for block in (-1, 8):
        with pytest.raises(StorageError, match=rf"block: {block} \(allowed: 0 to 7\)"):
            storage.read([0, block], buffers(2))
    with pytest.raises(StorageError, match=r"buffers: 1 \(allowed: 2, one per block\)"):
        storage.write([0, 1], buffers(1))
    with pytest.raises(StorageError, match=r"buffers: one of 4096 bytes \(allowed: 8192\)"):
        storage.write([0], [aligned_buffer(4096)])


def test_full_file_system_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"File too large|No space left"):
        DiskStorage(tmp_path / "blocks", 2**40, 2**20)
    with pytest.raises(StorageError, match="No such file"):
        DiskStorage(tmp_path / "nowhere" / "blocks", 1, 1)


@pytest.mark.parametrize(("zero_fill", "reserved"), [(True, "zeroed"), (False, "sparse")])
def test_missing_file_system_features_are_optional(tmp_path, monkeypatch, zero_fill, reserved):
    def lacks(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(disk.os, "posix_fallocate", lacks)
    monkeypatch.setattr(disk.os, "O_DIRECT", 1 << 30)
    of = DiskStorage(tmp_path / "blocks", 8, BLOCK_BYTES, zero_fill=zero_fill)
    assert of.abilities.reserved == reserved
    assert os.stat(of.path).st_size == 8 * STRIDE
    assert (os.stat(of.path).st_blocks > 0) == zero_fill
    of.write([7], numbered([5]))
    assert read(of, [7]) == [5]
    of.close()
